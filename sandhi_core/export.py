"""Writes a merged pool as checkpoints (docs/format.md, "Export"): stock transformers opens those that add nothing to
shared tensors, sandhi_core.serving.load opens all.

An export is made whole in a staging directory, flushed to the disk and renamed to a name that follows from
its manifest: a killed export leaves nothing under a final name, and the next one removes what it left.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sandhi_core.adapters import Link, stock_files, stock_plan
from sandhi_core.assignment import Assignment, factors_among
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.safetensors_file import Entry, UnreadError, write_hashed
from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError, StoreError
from sandhi_core.files import aside, flush, fsync_directory, unwritable, write_atomic, writing
from sandhi_core.layout import MANIFEST, index_bytes, index_name, make_manifest, shards
from sandhi_core.pools.pool import Pool
from sandhi_core.records import ExportedTensor, Fingerprint, Linked, Manifest, MergedWeights
from sandhi_core.store import Store
from sandhi_core.threads import each_on_a_thread

_CLONE = 0x40049409  # FICLONE, ioctl_ficlonerange(2)
_CHUNK = 16 << 20  # bytes


def export_pool(
    pool: Pool,
    point: str,
    checkpoints: Mapping[str, Checkpoint],
    fingerprints: Mapping[str, Fingerprint],
    assignments: Mapping[str, Assignment],
    weights_keys: Mapping[str, str],
    store: Store,
    exports: Path,
) -> MergedWeights:
    """Write `exports`/POOL/ID, where each model holds its assignment, from the store, and otherwise its own tensors;
    all mappings by model name. An intact export of the same manifest stays. One process at a time exports a pool;
    another waits. Where the pool asks for adapters, those and their bases stand beside the models (`adapters`).

    Raises CheckpointError where a model's files are no longer those of its fingerprint, StoreError where a
    tensor is not in the store or the disk cannot take the export, or not link what adapters share with the models.
    """
    home = _home(exports, pool.name)
    with _alone(exports, pool.name):
        try:
            _clear(home)
            staging = home / ".staging"
            staging.mkdir()
            linked = _reach(store, staging)
            alignment = pool.deploy.alignment_bytes
            store = Store(store.root, alignment)
            manifest = make_manifest(pool.name, point, fingerprints, assignments, weights_keys, linked, alignment)
            if pool.deploy.adapters is not None:
                plan = stock_plan(manifest.models, pool.deploy.adapters.max_rank)
                manifest = manifest.model_copy(update={"stock": plan})
            final = home / manifest.digest[:16]
            if not final.is_dir() or verify_disk(final, manifest).problems:
                _write(staging, manifest, checkpoints, assignments, store)
                _publish(staging, final)
        except OSError as error:
            raise _unwritable(home, error) from error
        finally:
            with suppress(OSError):  # on a disk that takes no change any more: the next export removes it
                _clear(home)
    return MergedWeights(
        pool=pool.name,
        export=f"{home.parent.name}/{pool.name}/{final.name}",
        manifest=manifest.digest,
        models=tuple(sorted(manifest.models)),
    )


def _write(
    staging: Path,
    manifest: Manifest,
    checkpoints: Mapping[str, Checkpoint],
    assignments: Mapping[str, Assignment],
    store: Store,
) -> None:
    _provide(manifest, checkpoints, store)
    own: list[tuple[str, str, dict[str, ExportedTensor]]] = []
    placed: dict[Path, Path] = {}  # store entry -> its first place in this export
    for name, model in sorted(manifest.models.items()):
        target = staging / model.directory
        target.mkdir()
        for file, digest in sorted(model.files.items()):
            _copy_beside(checkpoints[name], file, digest, target / file)
        for file, members in shards(model).items():
            if all(tensor.sharing == "private" for tensor in members.values()):
                own.append((name, file, members))
                continue
            ((tensor_name, tensor),) = members.items()
            _place(store.path(tensor.digest, tensor_name), target / file, model.linked, placed)
        write_atomic(target / index_name(model), index_bytes(model), mode=0o444)

    def write(shard: tuple[str, str, dict[str, ExportedTensor]]) -> None:
        name, file, members = shard
        model = manifest.models[name]
        assigned = assignments.get(name, Assignment()).tensors.keys() | factors_among(model.tensors).keys()
        _write_private(staging / model.directory / file, members, checkpoints[name], assigned, store)

    for _ in each_on_a_thread(write, own, writes=True):
        pass
    _stock(staging, manifest)
    write_atomic(staging / MANIFEST, manifest.canonical(), mode=0o444)
    for directory, _, _ in os.walk(staging, topdown=False):
        fsync_directory(Path(directory))


def _write_private(
    target: Path, members: Mapping[str, ExportedTensor], checkpoint: Checkpoint, assigned: Collection[str], store: Store
) -> None:
    """Write a shard of a model's own, held to the manifest's digests as it is written."""
    try:
        with writing(target, sum(tensor.nbytes for tensor in members.values())):
            found = write_hashed(target, _private(members, checkpoint, assigned, store))
    except UnreadError as error:
        if error.tensor in assigned:
            raise store.unread(members[error.tensor].digest) from None
        raise checkpoint.unread(error.tensor) from None
    for name, tensor in members.items():
        if found[name] != tensor.digest:
            raise _changed(checkpoint, checkpoint.header(name).file, name)


def _provide(manifest: Manifest, checkpoints: Mapping[str, Checkpoint], store: Store) -> None:
    """Have every shared tensor in the store, read back and right to the byte: several at once."""
    wanted: dict[Path, tuple[Checkpoint, str, ExportedTensor]] = {}
    for model_name, model in sorted(manifest.models.items()):
        for name, tensor in sorted(model.tensors.items()):
            if tensor.sharing != "private":
                wanted.setdefault(store.path(tensor.digest, name), (checkpoints[model_name], name, tensor))

    def provide(source: tuple[Checkpoint, str, ExportedTensor]) -> None:
        checkpoint, name, tensor = source
        if tensor.sharing == "merged":
            store.provide(tensor.digest, name)
            return
        if store.put(name, checkpoint.tensor(name)) != tensor.digest:
            raise _changed(checkpoint, checkpoint.header(name).file, name)
        checkpoint.release(name)

    for _ in each_on_a_thread(provide, wanted.values()):
        pass


def _stock(staging: Path, manifest: Manifest) -> None:
    """Add bases and adapters to the models: no weight file of them is a new one."""
    for path, source in stock_files(manifest).items():
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(source, Link):
            write_atomic(target, source, mode=0o444)
            continue
        try:
            target.hardlink_to(staging / source.to)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            raise StoreError(
                f"cannot be a hard link to {source.to}, and a copy would take the bytes again: {error.strerror}",
                file=path,
                remedy="put the artifact root on a file system with hard links, or remove deploy.adapters",
            ) from error


def _private(
    members: Mapping[str, ExportedTensor], checkpoint: Checkpoint, assigned: Collection[str], store: Store
) -> Iterator[Entry]:
    """The tensors of a shard of a model's own, as views: its own, and what it was assigned and no other model holds."""
    for name, tensor in members.items():
        if name in assigned:
            yield store.entry(tensor.digest)._replace(name=name)
        else:
            yield _own(checkpoint, name)


def _own(checkpoint: Checkpoint, name: str) -> Entry:
    header = checkpoint.header(name)
    return Entry(name, header.dtype, header.shape, checkpoint.raw(name))


def _copy_beside(checkpoint: Checkpoint, file: str, digest: str, target: Path) -> None:
    """Copy a file that is not weights, following links, byte for byte."""
    target.parent.mkdir(parents=True, exist_ok=True)
    seen = hashlib.sha256()
    with (checkpoint.directory / file).open("rb") as source, target.open("xb") as copy:
        while chunk := _read(checkpoint, file, source):
            seen.update(chunk)
            copy.write(chunk)
        flush(copy)
    target.chmod(0o444)
    if seen.hexdigest() != digest:
        raise _changed(checkpoint, file)


def _read(checkpoint: Checkpoint, file: str, source: BinaryIO) -> bytes:
    with checkpoint.reading(file):
        return source.read(_CHUNK)


def _changed(checkpoint: Checkpoint, file: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(
        "changed since the checkpoint was read",
        model=checkpoint.model,
        file=file,
        tensor=tensor,
        remedy="build again, so that the model's checkpoint stage sees the new file",
    )


# --- links --------------------------------------------------------------------------------------------------


def _reach(store: Store, staging: Path) -> Linked:
    """The best way from the store into an export: tried on a file, since file systems differ."""
    store.root.mkdir(parents=True, exist_ok=True)
    target = staging / ".probe"
    with aside(store.root) as (source, f):
        f.write(b"probe")
        f.flush()
        for linked in ("hardlink", "reflink"):
            try:
                _transfer(source, target, linked)
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
            else:
                return linked
            finally:
                target.unlink(missing_ok=True)
        return "copy"


# What file systems answer to a link or a clone that they cannot make, or not from there to here.
_UNABLE = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EMLINK}


def _place(entry: Path, target: Path, linked: Linked, placed: dict[Path, Path]) -> None:
    """Bring a store entry into the export. Where that is no hard link, the models of this export still share:
    the second one links to the first one's file."""
    if linked != "hardlink" and entry in placed:
        try:
            target.hardlink_to(placed[entry])
            return
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
    _transfer(entry, target, linked)
    placed.setdefault(entry, target)


def _transfer(source: Path, target: Path, linked: Linked) -> None:
    if linked == "hardlink":
        target.hardlink_to(source)
        return
    with source.open("rb") as original, target.open("xb") as copy:
        if linked == "reflink":
            fcntl.ioctl(copy.fileno(), _CLONE, original.fileno())
        else:
            shutil.copyfileobj(original, copy, _CHUNK)
            copy.flush()
        os.fsync(copy.fileno())
    target.chmod(0o444)


# --- directories --------------------------------------------------------------------------------------------


@contextmanager
def _alone(exports: Path, pool: str) -> Iterator[None]:
    """Hold the pool's export lock; the kernel releases it when the process ends, however it ends."""
    path = exports / f".{pool}.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _home(exports: Path, pool: str) -> Path:
    """The directory of a pool's exports; never one elsewhere that a link leads to."""
    home = exports / pool
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(home, error) from error
    if home.is_symlink():
        raise StoreError(
            "leads out of the exports directory",
            file=str(home),
            remedy="remove this link and build again",
        )
    return home


def _unwritable(home: Path, error: OSError) -> StoreError:
    return unwritable(Path(error.filename or home), error)


def _publish(staging: Path, final: Path) -> None:
    """Give the finished export its name. A damaged one that bears it goes: processes that map its files keep
    them."""
    if final.exists():
        final.rename(final.with_name(".damaged"))
    staging.rename(final)
    fsync_directory(final.parent)


def _clear(home: Path) -> None:
    """Remove what is not finished: of this export, or of one that was killed."""
    for path in home.glob(".*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
