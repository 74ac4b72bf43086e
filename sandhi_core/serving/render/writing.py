"""Renderings as files: whole or not there."""

from pathlib import Path
from typing import Literal

from sandhi_core.errors import StoreError, UsageError
from sandhi_core.files import write_atomic
from sandhi_core.serving.members import Deployed, Member
from sandhi_core.serving.processes import shown_host
from sandhi_core.serving.render.compose import compose
from sandhi_core.serving.render.containers import Target
from sandhi_core.serving.render.kubernetes import kubernetes
from sandhi_core.serving.render.litellm import proxy_config

To = Literal["compose", "kubernetes", "litellm"]


def rendered(to: To, deployed: Deployed, members: tuple[Member, ...], target: Target) -> bytes:
    """The file's bytes: a function of the export, the members and the target alone. Raises UsageError where two members
    would be one host."""
    _require_told_apart(members)
    match to:
        case "compose":
            return compose(deployed, members, target)
        case "kubernetes":
            return kubernetes(deployed, members, target)
        case "litellm":
            return proxy_config(members, target.host and shown_host(target.host))


def _require_told_apart(members: tuple[Member, ...]) -> None:
    taken: dict[str, str] = {}
    for member in members:
        if (other := taken.setdefault(member.host_name, member.name)) != member.name:
            raise UsageError(
                f"{other} and {member.name} would both be the host {member.host_name}",
                remedy="render them into two folders with --only, or rename one in the pool file",
            )


def write(to: To, deployed: Deployed, members: tuple[Member, ...], target: Target, folder: Path) -> Path:
    """Write the rendering into `folder` as `<to>.yaml`; returns its path. Raises StoreError where it cannot be,
    UsageError within the export, which a further file would damage."""
    if folder.resolve().is_relative_to(deployed.root):
        raise UsageError(f"--out {folder} is in the export, which nothing is added to", remedy="name another directory")
    path = folder / f"{to}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, rendered(to, deployed, members, target))
    except OSError as error:
        raise StoreError(
            f"cannot be written: {error.strerror}", file=str(path), remedy="name a directory that can be written"
        ) from None
    return path
