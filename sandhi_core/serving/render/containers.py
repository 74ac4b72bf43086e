"""What a container of a member is, whoever runs it."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from sandhi_core.deploy.launch import PYTHON
from sandhi_core.errors import UsageError
from sandhi_core.serving.members import Deployed, Member

EXPORT = PurePosixPath("/export")
"""Where the export is mounted, read-only: all containers of a machine read the same files, hence the same pages."""
IMAGE = "sandhi-vllm"
"""The image by default: no published one, but vLLM's with this package added (docs/serving.md)."""
RUNTIME_BYTES = 2 << 30
"""What a server takes beside weights and cache: interpreter, libraries, activations. An estimate."""
READY_SECONDS = 1800
"""How long a server may take to load before it counts as failed."""
STOP_SECONDS = 30
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # DNS subdomain (RFC 1123), as Kubernetes names objects
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True)
class Target:
    """What is rendered for. `image`: has the engine and, where shared tensors are mapped, this package. `path`: of the
    export on the machine (empty: where it lies), or in the volume of the claim `claim`. `host`: where all servers
    listen, for a proxy elsewhere than beside them."""

    image: str = IMAGE
    path: str = ""
    claim: str | None = None
    host: str | None = None

    @classmethod
    def of(cls, image: str | None, path: str | None, claim: str | None, host: str | None) -> "Target":
        """Raises UsageError for what a mount, a claim or an address cannot be: the file would not be valid."""
        for option, given in (("--image", image), ("--path", path), ("--claim", claim), ("--host", host)):
            if given is not None and not given.isprintable():
                raise UsageError(f"{option} {given!r} has unprintable characters", remedy="leave them out")
        if path and not claim and not path.startswith("/"):
            raise UsageError(f"--path {path} is relative", remedy="give it from / on, as it is on the machine")
        if path and not claim and ".." in path.split("/"):
            raise UsageError(f"--path {path} has .. in it", remedy="give it without: Kubernetes refuses it")
        if claim is not None and not _CLAIM.fullmatch(claim):
            remedy = "give its name: lower-case letters, digits, - and ."
            raise UsageError(f"--claim {claim!r} is no name of a claim", remedy=remedy)
        if host is not None and not _HOST.fullmatch(host):
            raise UsageError(f"--host {host!r} is no host", remedy="give a name or an address, without scheme and port")
        if path and claim and (path.startswith("/") or ".." in path.split("/")):
            raise UsageError(f"--path {path} leads out of the claim", remedy="give it relative to the claim's volume")
        return cls(image or IMAGE, path or "", claim, host)


def source(deployed: Deployed, target: Target) -> str:
    """Where the export lies on the machine. Raises UsageError for bytes that are no text, which YAML cannot say."""
    path = target.path or str(deployed.root)
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        remedy = "rename the folder, or give --path where it will lie"
        raise UsageError(f"the path {shown} is no UTF-8, which a YAML file cannot say", remedy=remedy) from None
    return path


def command(member: Member) -> list[str]:
    return list(member.command(EXPORT, python=PYTHON, host="0.0.0.0"))


def healthy(url: str) -> list[str]:
    """A command that succeeds once a server is healthy; images of engines have Python, but not always curl."""
    return [PYTHON, "-c", f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"]


def memory_bytes(deployed: Deployed, members: tuple[Member, ...]) -> dict[str, int]:
    """Bytes of main memory to reserve, by member, for weights where models run on the CPU. Not for the cache: how much
    it is given follows from the memory of a device that need not be the machine's.

    Private weights and RUNTIME_BYTES; and of shared tensors those that no member before it holds: the kernel
    charges a page of a file to the container that reads it first. A server that copies is charged for all it holds.
    """
    first: set[tuple[str, str]] = set()
    found: dict[str, int] = {}
    for member in members:
        mapped = 0
        if member.maps:
            tensors = deployed.manifest.models[member.models[0]].tensors
            held = {(name, t.digest): t.nbytes for name, t in tensors.items() if t.sharing != "private"}
            mapped = sum(nbytes for key, nbytes in held.items() if key not in first)
            first |= held.keys()
        own = member.private_bytes + (0 if member.maps else member.shared_bytes)
        found[member.name] = own + mapped + RUNTIME_BYTES
    return found
