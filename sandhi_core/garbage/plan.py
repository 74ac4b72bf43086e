"""What goes from an artifact root: everything of a known layout that neither a pool nor an export that stays needs."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandhi_core.artifacts import Artifacts
from sandhi_core.garbage.exports import Export, exports_of
from sandhi_core.garbage.in_use import InUse
from sandhi_core.garbage.references import references
from sandhi_core.garbage.removal import Kind, Removal
from sandhi_core.graph import STAGES, Catalogue, Node
from sandhi_core.records import Manifest

_DIGEST = re.compile(r"[0-9a-f]{64}")
_REPORT = (".html", ".png", ".parquet")


@dataclass(frozen=True)
class Garbage:
    """`removals` in the order in which they go; `kept` are the exports, and what lies among them, that stay, each with
    why; `others` are pools of the root that were not named, whose results stay, `gone` those that were said to be no
    more."""

    removals: tuple[Removal, ...]
    kept: tuple[Export, ...]
    others: tuple[str, ...]
    gone: tuple[str, ...]


def garbage(
    catalogue: Catalogue,
    artifacts: Artifacts,
    in_use: InUse,
    *,
    keep: int,
    gone: bool,
    inputs: Mapping[str, str] | None,
) -> Garbage:
    """`catalogue`: the pools that are looked at; `keep`: earlier exports of each that stay; `gone`: pools of the root
    that it does not have are no more. `inputs`: by model the key of the moments of its inputs; None where they are not
    known of every model, and all inputs and spectra stay.

    Raises StoreError for a record that cannot be read: what it needs would go. OSError for a directory."""
    known = _pools(artifacts)
    others = tuple(sorted(known - catalogue.pools.keys())) if not gone else ()
    exports = [
        export
        for pool in sorted(known | catalogue.pools.keys())
        if pool not in others
        for export in exports_of(artifacts, pool, keep=keep, gone=pool not in catalogue.pools, in_use=in_use)
    ]
    untouched = [e for p in others for e in exports_of(artifacts, p, keep=0, gone=False, in_use=in_use)]
    stays = [export for export in exports if export.why]
    records = list(_records(catalogue, artifacts, others))
    dropped = set(records)
    members = [k for k in artifacts.keys("plan") if ("plan", k) not in dropped]
    manifests = [e.manifest for e in [*stays, *untouched] if e.manifest is not None]
    removals = [Removal("export", e.path, e.files) for e in exports if not e.why]
    removals += _recorded(artifacts, records)
    removals += _reports(artifacts, () if others else known - catalogue.pools.keys())
    removals += _kept_for_pools(artifacts, members, manifests, None if others else inputs, in_use)
    return Garbage(tuple(removals), tuple(stays), others, tuple(sorted(known - catalogue.pools.keys())) if gone else ())


def _pools(artifacts: Artifacts) -> set[str]:
    """Every pool that the root has anything of."""
    keys = {k.partition(".")[0] for s, stage in STAGES.items() if stage.scope != "model" for k in artifacts.keys(s)}
    folders = (artifacts.root / "exports", artifacts.root / "reports")
    return keys | {p.name for f in folders if f.is_dir() for p in f.iterdir() if p.is_dir() and p.name[0] != "."}


# --- records and reports ------------------------------------------------------------------------------------


def _records(catalogue: Catalogue, artifacts: Artifacts, others: Collection[str]) -> Iterator[Node]:
    """Those of nothing that the pool files have, downstream first. What a model gave by itself is kept while there are
    pools whose files were not given; the groups of a pool while one of its models cannot be read, because which group
    that belongs to is not known."""
    current = {(s, key) for s, stage in STAGES.items() for key in catalogue.keys(stage.scope)}
    unsettled = {name for name in catalogue.pools if catalogue.unreadable(name)}
    for stage in reversed(STAGES):
        scope = STAGES[stage].scope
        left = {*others, *unsettled} if scope == "group" else others
        for key in artifacts.keys(stage):
            owned = not others if scope == "model" else key.partition(".")[0] not in left
            if owned and (stage, key) not in current:
                yield stage, key


def _recorded(artifacts: Artifacts, nodes: Collection[Node]) -> Iterator[Removal]:
    for stage, key in nodes:
        path = artifacts.root / "records" / stage / f"{key}.json"
        yield Removal("record", path, (path,))


def _reports(artifacts: Artifacts, pools: Collection[str]) -> Iterator[Removal]:
    for pool in sorted(pools):
        folder = artifacts.root / "reports" / pool
        if files := _plain(folder, lambda name: name.endswith(_REPORT)):
            yield Removal("report", folder, files)


# --- what is kept so that it need not be made again -----------------------------------------------------------


def _kept_for_pools(
    artifacts: Artifacts,
    members: Collection[str],
    manifests: Collection[Manifest],
    inputs: Mapping[str, str] | None,
    in_use: InUse,
) -> Iterator[Removal]:
    root = artifacts.root
    wanted = references(artifacts, members, manifests, inputs or {})
    if inputs is not None:
        for file in _plain(root / "spectra", lambda name: bool(_DIGEST.fullmatch(name.partition(".")[0]))):
            if file.name not in wanted.spectra:
                yield Removal("spectrum", file, (file,))
        yield from _folders("inputs", root / "inputs", set(inputs.values()), in_use)
    for file in _plain(root / "store" / "recipes", lambda name: bool(_DIGEST.fullmatch(name.removesuffix(".json")))):
        if file.stem not in wanted.recipes:
            yield Removal("recipe", file, (file,))
    yield from _folders("tensor", root / "store", wanted.tensors, in_use)


def _folders(kind: Kind, home: Path, wanted: Collection[str], in_use: InUse) -> Iterator[Removal]:
    """Folders named by a digest that is not wanted; of each the weight files, which nobody may have mapped."""
    for folder in sorted(home.iterdir()) if home.is_dir() else ():
        if not _DIGEST.fullmatch(folder.name) or folder.name in wanted or folder.is_symlink():
            continue
        files = [file for place in (folder, folder / "2MiB") for file in _plain(place, _is_weights)]
        if files and in_use.of(folder, {file.lstat().st_ino for file in files}) is None:
            yield Removal(kind, folder, tuple(files))


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _plain(folder: Path, ours: Callable[[str], bool]) -> tuple[Path, ...]:
    """The plain files of a folder that have a name of ours, sorted; no links, and nothing of a linked folder."""
    if folder.is_symlink() or not folder.is_dir():
        return ()
    found = (Path(entry.path) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    return tuple(sorted(path for path in found if path.name[0] != "." and ours(path.name)))
