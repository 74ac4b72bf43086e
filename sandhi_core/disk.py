"""An export read back from the disk: every byte against the manifest, and what its files really share."""

import filecmp
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandhi_core.adapters import Link, stock_files, stock_plan
from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import FormatError, UnreadError, map_file, release
from sandhi_core.errors import Problem
from sandhi_core.files import is_aside
from sandhi_core.layout import DEPLOYMENT, MANIFEST, index_bytes, index_name, shards, unlinked
from sandhi_core.records import ExportedModel, ExportedTensor, Manifest, StockPlan
from sandhi_core.savings import padding_of

RESTORE = "restore it from a sound copy of the export, or remove the export and build again"
LINKS = (
    "on a file system with hard links, copy the export again by `cp -a` or `rsync -aH`, which keep them, or build again"
)

Found = dict[str, tuple[str, tuple[int, ...], int, str]]
"""Tensor name to dtype, shape, bytes and digest, as a file holds them."""


@dataclass(frozen=True)
class DiskCheck:
    """`tensor_bytes` is what the models hold, each on its own; `distinct_bytes` the same with every file
    (inode) counted once, whatever its names, and with what pads shared files to more than a page: the difference is
    what the export shares."""

    problems: tuple[Problem, ...]
    tensors_checked: int
    tensor_bytes: int
    distinct_bytes: int

    @property
    def shared_bytes(self) -> int:
        return self.tensor_bytes - self.distinct_bytes


def verify_disk(export_root: Path, manifest: Manifest) -> DiskCheck:
    """Re-read every tensor and every copied file of an export. Differences are problems, never exceptions: a
    missing, extra, damaged or linked-away file, an index or header that says otherwise than the manifest, a shared
    shard that is no longer one file, a base or an adapter that is not made of the models' files. In a model's problem
    `file` is relative to the model's directory."""
    reading = _Reading(manifest.alignment)
    problems = list(_followed(manifest))
    if problems:  # what it says of bases and adapters is nothing to go by
        manifest = manifest.model_copy(update={"stock": None})
    else:
        problems += _listing(export_root, manifest)
    for name, model in sorted(manifest.models.items()):
        directory = export_root / model.directory
        problems += beside_weights(export_root, name, model)
        for file, tensors in shards(model).items():
            problems += (_damage(p, name, file, tensor) for tensor, p in reading.shard(directory / file, tensors))
    problems += _lost_links(export_root, manifest)
    problems += _stock(export_root, manifest)
    return DiskCheck(tuple(problems), reading.tensors, reading.total, sum(reading.distinct.values()))


def beside_weights(export_root: Path, name: str, model: ExportedModel) -> Iterator[Problem]:
    """What is wrong with a model's files that are no weights: its index, and the copies of its checkpoint's."""
    copies = model.files | {index_name(model): hashlib.sha256(index_bytes(model)).hexdigest()}
    for file, digest in sorted(copies.items()):
        yield from (_damage(p, name, file) for p in _copy(export_root / model.directory / file, digest))


def names(manifest: Manifest) -> set[str]:
    """Every file that an export may have, as a path from its root."""
    expected = {MANIFEST, DEPLOYMENT}
    for model in manifest.models.values():
        expected |= {f"{model.directory}/{f}" for f in (index_name(model), *model.files, *shards(model))}
    return expected | stock_files(manifest).keys()


def _damage(message: str, model: str | None, file: str, tensor: str | None = None) -> Problem:
    code = "export-tensor" if tensor else "export-file"
    return Problem(code=code, severity="error", model=model, file=file, tensor=tensor, message=message, remedy=RESTORE)


def _listing(export_root: Path, manifest: Manifest) -> Iterator[Problem]:
    """The manifest itself, and everything below the root that it does not speak of."""
    path = export_root / MANIFEST
    if path.is_symlink() or not path.is_file() or path.read_bytes() != manifest.canonical():
        yield _damage("is not the manifest of these weights in its canonical form", None, MANIFEST)
    expected = names(manifest)
    for directory, subdirectories, files in os.walk(export_root):
        links = [d for d in subdirectories if (Path(directory) / d).is_symlink()]
        for name in sorted(files + links):
            file = (Path(directory) / name).relative_to(export_root).as_posix()
            if file not in expected and not is_aside(name):
                yield Problem(
                    code="export-file",
                    severity="error",
                    file=file,
                    message="is no part of the export",
                    remedy="move it elsewhere",
                )


def _lost_links(export_root: Path, manifest: Manifest) -> Iterator[Problem]:
    for name, (first, *others) in unlinked(export_root, manifest).items():
        model = manifest.models[name]
        again = sum(shard.nbytes for shard in model.tensors.values() if shard.file in (first, *others))
        more = f", as {len(others)} more of this model are" if others else ""
        yield Problem(
            code="export-links",
            severity="error",
            model=name,
            file=first,
            message=f"is a file of its own{more}; the manifest says {model.linked}: {again} bytes are held again",
            remedy=LINKS,
        )


def _followed(manifest: Manifest) -> Iterator[Problem]:
    """Whether the plan of bases and adapters is the one that follows from the models, in whichever words."""
    plan = manifest.stock
    if plan is not None and _wordless(plan) != _wordless(stock_plan(manifest.models, plan.max_rank)):
        yield _damage("has a plan of bases and adapters that does not follow from its models", None, MANIFEST)


def _wordless(plan: StockPlan) -> StockPlan:
    others = {name: why.model_copy(update={"reason": ""}) for name, why in plan.ordinary.items()}
    return plan.model_copy(update={"ordinary": others})


def _stock(export_root: Path, manifest: Manifest) -> Iterator[Problem]:
    """What is wrong with bases and adapters. Their weight files are those of models, whose every byte is read there."""
    for path, source in stock_files(manifest).items():
        if not isinstance(source, Link):
            yield from (_damage(p, None, path) for p in _copy(export_root / path, hashlib.sha256(source).hexdigest()))
        elif what := unreadable(export_root / path):
            yield _damage(what, None, path)
        elif unreadable(export_root / source.to) is None and not source.linked(export_root, path):
            yield from _unlike(export_root, path, source)


def _unlike(export_root: Path, path: str, source: Link) -> Iterator[Problem]:
    if filecmp.cmp(export_root / path, export_root / source.to, shallow=False):
        again = (export_root / path).stat().st_size
        message = f"is a file of its own, not {source.to} by another name: {again} bytes are held again"
        yield Problem(code="export-links", severity="error", file=path, message=message, remedy=LINKS)
    else:
        yield _damage(f"is not {source.to}, whose bytes it must have", None, path)


def _copy(path: Path, digest: str) -> Iterator[str]:
    if problem := unreadable(path):
        yield problem
        return
    try:
        with path.open("rb") as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != digest:
                yield "differs from what was exported"
    except OSError as error:
        yield f"cannot be read: {error.strerror or error}"


def unreadable(path: Path) -> str | None:
    """What is wrong with a path that should be a plain file; None where nothing is."""
    if path.is_symlink():
        return "is a symbolic link, not the file itself" if path.exists() else "is a link to nothing"
    if not path.exists():
        return "is missing"
    if not path.is_file() or not os.access(path, os.R_OK):
        return "is no readable file"
    return None


@dataclass
class _Reading:
    """What has been read so far, of shared files aligned to `alignment`. A file that several models link to is read
    once."""

    alignment: int
    tensors: int = 0
    total: int = 0
    distinct: dict[tuple[int, int], int] = field(default_factory=dict)
    found: dict[tuple[int, int], Found | str] = field(default_factory=dict)

    def shard(self, path: Path, expected: dict[str, ExportedTensor]) -> Iterator[tuple[str | None, str]]:
        """What is wrong with a shard: the tensor, or None where it is the whole file; and the difference."""
        if problem := unreadable(path):
            yield None, problem
            return
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        if identity not in self.found:
            self.found[identity] = _read(path)
        found = self.found[identity]
        if isinstance(found, str):
            yield None, found
            return
        nbytes = sum(size for _, _, size, _ in found.values())
        self.distinct[identity] = nbytes
        if padding_of(self.alignment) and all(tensor.sharing != "private" for tensor in expected.values()):
            self.distinct[identity] = status.st_size
            if (status.st_size - nbytes) % self.alignment:
                yield None, f"has its tensor at byte {status.st_size - nbytes}, no multiple of {self.alignment}"
        self.total += nbytes
        self.tensors += len(found)
        for name in sorted(found.keys() | expected.keys()):
            if name not in expected:
                yield name, "does not belong into this file"
            elif name not in found:
                yield name, "is missing"
            elif found[name] != _facts(expected[name]):
                yield name, "is not the tensor that was scored"


def _facts(tensor: ExportedTensor) -> tuple[str, tuple[int, ...], int, str]:
    return tensor.dtype, tensor.shape, tensor.nbytes, tensor.digest


def _read(path: Path) -> Found | str:
    found = {}
    try:
        for name, entry in map_file(path).items():
            digest = tensor_digest(entry.dtype, entry.shape, entry.raw)
            found[name] = entry.dtype, entry.shape, entry.raw.nbytes, digest
            release(entry.raw)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except FormatError as error:
        return str(error) if isinstance(error, UnreadError) else f"is damaged: {error}"
    return found
