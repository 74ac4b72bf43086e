"""One model of an export as its files are mapped: read-only, held to the manifest, a digest in memory once.

Every loader stands on this. A tensor is a view of a MAP_SHARED, PROT_READ mapping: all processes that map the file
have the same pages of the page cache, and a stray write into one is a segmentation fault, not another model's answers.
A mapping belongs to the file that was opened: one that is put in its place later is not seen. A file that is cut
short while it is mapped kills whoever reads on (SIGBUS, mmap(2)), which no reader can turn into an error.
"""

import hashlib
import mmap
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

from torch import Tensor

from sandhi_core.assignment import factor_names, is_factor, vector_names
from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import FormatError, Place, UnreadError, header_of, tensor_over
from sandhi_core.checkpoints.survey_files import FileIdentity, read_json
from sandhi_core.disk import RESTORE
from sandhi_core.errors import CheckpointError, ProofError
from sandhi_core.files import open_regular
from sandhi_core.layout import MANIFEST, read_manifest, shards
from sandhi_core.records import ExportedTensor, Manifest
from sandhi_core.rungs.residual import Residual
from sandhi_core.savings import worth_a_file

Digests = Literal["full", "sampled", "off"]
"""How much of what is mapped is held to the manifest's digests: every tensor, some of them, none."""

CONFIG = "config.json"
_SAMPLE = 32  # one tensor of so many
_READERS = 8  # threads that hash at once: sha256 leaves the interpreter to others


def drawn(names: Collection[str], salt: str, how: Digests) -> list[str]:
    """The tensors that are looked at, sorted: of a salt always the same ones."""
    if how == "off":
        return []
    order = sorted(names, key=lambda name: hashlib.sha256(f"{salt} {name}".encode()).digest())
    return sorted(order if how == "full" else order[: max(len(order) // _SAMPLE, 1)])


class _Mapping(mmap.mmap):
    """A whole file, and where its tensors lie. The header is read in the mapping: what maps the file keeps it in
    memory, and the next process that opens it reads nothing from the disk."""

    places: dict[str, Place]


_File = tuple[int, FileIdentity]  # by its device
_maps: WeakValueDictionary[_File, _Mapping] = WeakValueDictionary()
_mapping = Lock()


class Shard:
    """A weight file of a path; over one mapping a file and process, whatever names the file is opened by, for as long
    as a view of it is alive."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be opened, FormatError unless it is a whole safetensors file."""
        with open_regular(path) as f:
            file = _file(f.fileno())
            size = file[1].size
            with _mapping:
                mapping = _maps.get(file)
                if mapping is None:
                    if not size:
                        raise FormatError("it is empty")
                    mapping = _Mapping(f.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                    mapping.places = header_of(mapping, size)
                    _maps[file] = mapping
        self.path = path
        self.places = mapping.places
        self._file, self._mapping, self._view = file, mapping, memoryview(mapping)
        self._own: memoryview | None = None

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes, row-major."""
        place = self.places[name]
        return self._view[place.start : place.end]

    def own(self, name: str) -> memoryview:
        """A tensor's bytes, for this Shard alone: pages that are written are copied. Raises OSError unless the path
        still has the file that is mapped, whose bytes may have been held to digests."""
        if self._own is None:
            # A descriptor kept since then would be a second one for each of some hundred files.
            with open_regular(self.path) as f:
                if _file(f.fileno()) != self._file:
                    raise OSError("another file has taken its place meanwhile")
                size = self._file[1].size
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                self._own = memoryview(mmap.mmap(f.fileno(), size, flags=mmap.MAP_PRIVATE, prot=prot))
        place = self.places[name]
        return self._own[place.start : place.end]

    def rest(self) -> None:
        """Take the mapping's pages out of this process; whoever reads on has them back from the page cache."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def _file(descriptor: int) -> _File:
    status = os.fstat(descriptor)
    return status.st_dev, FileIdentity.of(status)


class MappedModel:
    """A model directory of an export. `tensors` is what the manifest says of each, by name."""

    def __init__(self, model: str, files: "_Shards") -> None:
        self.model = model
        self.manifest = files.manifest
        self.directory = files.root / self.manifest.models[model].directory
        self.tensors: Mapping[str, ExportedTensor] = self.manifest.models[model].tensors
        self._require_config()
        self._own = {name: files.own(model, tensor) for name, tensor in self.tensors.items()}
        # Where each is read, and its name there.
        self._held = {n: files.place(model, t) or (self._own[n], n) for n, t in self.tensors.items()}
        self._shared = frozenset(n for n, t in self.tensors.items() if t.sharing != "private" or files.alias(model, n))

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Map every file of the model whose directory this is, and hold the headers to the manifest beside it.

        Raises ProofError where the manifest cannot be read, is of another schema version, or says otherwise than a
        header or the configuration; CheckpointError where the directory is none of the export's models, or a file is
        missing, a link to nothing, cut short, or not safetensors.
        """
        directory = directory.resolve()
        manifest = read_manifest(directory.parent)
        model = model_in(manifest, directory)
        if model is None:
            raise CheckpointError(
                f"is none of the models of the export beside it ({MANIFEST})",
                model=directory.name,
                file=str(directory),
                remedy=f"give one of {', '.join(sorted(m.directory for m in manifest.models.values()))}",
            )
        return cls(model, _Shards(directory.parent, manifest))

    @classmethod
    def each(cls, root: Path, manifest: Manifest) -> Iterator[Self]:
        """Every model of an export whose manifest was read, sorted by name. What is not kept is not mapped any longer:
        a mapping takes a descriptor. Raises as `open` does, when it comes to a model."""
        files = _Shards(root.resolve(), manifest)
        for model in sorted(manifest.models):
            yield cls(model, files)
            files.leave()

    def shared(self) -> frozenset[str]:
        """The tensors that another model or another name holds too, in one file: shared shards, and aliases."""
        return self._shared

    def tensor(self, name: str) -> Tensor:
        """A view of the mapping, of the shape and dtype that the manifest has. Raises KeyError where the model has no
        such tensor."""
        tensor = self.tensors[name]
        return tensor_over(tensor.dtype, tensor.shape, self._raw(name))

    def own(self, name: str) -> Tensor:
        """A tensor that may be written, over the model's own file, whoever else has its bytes: a private mapping, of
        which pages that are written are copied.

        Raises KeyError as `tensor` does, CheckpointError where the file was replaced since it was opened.
        """
        tensor, shard = self.tensors[name], self._own[name]
        try:
            return tensor_over(tensor.dtype, tensor.shape, shard.own(name))
        except OSError as error:
            raise _damaged(self.model, shard.path, f"cannot be read: {error.strerror or error}", name) from None

    def file(self, name: str) -> tuple[Path, int]:
        """Where a tensor is read: the file, and the place of its first byte."""
        shard, there = self._held[name]
        return shard.path, shard.places[there].start

    def check(self, how: Digests = "full") -> None:
        """Hold what is mapped to the manifest's digests. `sampled`: one in 32 tensors, at least one, each as a whole:
        the same at every start, others for another model. Reading a tensor brings it into memory.

        Raises ProofError for the first tensor, by name, that is another, CheckpointError for one that cannot be read.
        """
        with ThreadPoolExecutor(_READERS) as readers:
            chosen = drawn(self.tensors, f"{self.manifest.digest} {self.model}", how)
            for name, found in zip(chosen, readers.map(self._digest, chosen), strict=True):
                if found != self.tensors[name].digest:
                    raise ProofError(
                        f"is not what was exported: its digest is {found}, {self.tensors[name].digest} is expected",
                        model=self.model,
                        file=str(self.file(name)[0]),
                        tensor=name,
                        remedy=RESTORE,
                    )

    def rest(self) -> None:
        """Take pages of the model's own files out of this process, where they were read to be copied or checked."""
        shared = self.shared()
        for shard in {id(s): s for name, (s, _) in self._held.items() if name not in shared}.values():
            shard.rest()

    def residual(self, weight: str) -> Residual | None:
        """What the model adds to a weight, as views. Raises CheckpointError where one of two parts is missing."""
        found = residual_among(self.tensors, weight, self.model, self.directory)
        return Residual(**{part: self.tensor(name) for part, name in found.items()}) if found else None

    def config(self) -> dict[str, Any]:
        """Its config.json. Raises CheckpointError where that cannot be read."""
        path = self.directory / CONFIG
        try:
            return read_json(path)
        except (OSError, ValueError) as error:
            raise _damaged(self.model, path, f"cannot be read: {error}") from None

    def _require_config(self) -> None:
        """The same tensors are another model by another configuration."""
        path, expected = self.directory / CONFIG, self.manifest.models[self.model].files.get(CONFIG)
        if expected is None:
            return
        if not path.is_file():
            raise _damaged(self.model, path, "is no file" if path.exists() else "is missing")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != expected:
            message = f"is not what was exported: its digest is {found}, {expected} is expected"
            raise ProofError(message, model=self.model, file=str(path), remedy=RESTORE)

    def _raw(self, name: str) -> memoryview:
        shard, there = self._held[name]
        return shard.raw(there)

    def _digest(self, name: str) -> str:
        tensor = self.tensors[name]
        try:
            return tensor_digest(tensor.dtype, tensor.shape, self._raw(name))
        except UnreadError as error:
            raise _damaged(self.model, self.file(name)[0], str(error), name) from None


def mapped_model(directory: Path) -> MappedModel | None:
    """The model whose directory this is, None where it is a checkpoint that belongs to no export, or a base that an
    export has beside its models. Raises as MappedModel.open does."""
    directory = directory.resolve()
    if not os.path.lexists(directory.parent / MANIFEST):
        return None
    manifest = read_manifest(directory.parent)
    model = model_in(manifest, directory)
    return MappedModel(model, _Shards(directory.parent, manifest)) if model else None


def model_in(manifest: Manifest, directory: Path) -> str | None:
    """The model of an export that lives in a directory, by the directory's name."""
    return next((name for name, model in manifest.models.items() if model.directory == directory.name), None)


def aliases(manifest: Manifest) -> dict[str, tuple[tuple[str, str], ...]]:
    """By digest, who holds a tensor that occurs under several names: (model, name), those in a file of their own first.
    All of them read it where the first one has it. Smaller ones than a page are not worth another file's page, and
    factors of residuals are their model's own."""
    holders: dict[str, list[tuple[bool, str, str]]] = defaultdict(list)
    for model, exported in manifest.models.items():
        for name, tensor in exported.tensors.items():
            if worth_a_file(tensor.nbytes, len(tensor.shape) == 1, merged=False) and not is_factor(name):
                holders[tensor.digest].append((tensor.sharing == "private", model, name))
    return {
        digest: tuple((model, name) for _, model, name in sorted(held))
        for digest, held in holders.items()
        if len({name for _, _, name in held}) > 1
    }


def residual_among(names: Collection[str], weight: str, model: str, directory: Path) -> dict[str, str]:
    """The names of what goes with a weight among a model's tensors, by what they are to a Residual. Raises
    CheckpointError where one factor or vector is there and the other is not."""
    found: dict[str, str] = {}
    pairs = (("factor", ("down", "up"), factor_names(weight)), ("vector", ("scale", "shift"), vector_names(weight)))
    for what, parts, pair in pairs:
        there = [name for name in pair if name in names]
        for name in pair:
            if there and name not in names:
                raise _damaged(model, directory, f"is missing, the other {what} of its weight is there", name)
        found |= dict(zip(parts, there, strict=False))
    return found


class _Shards:
    """The weight files of an export, each opened once and held to the manifest."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest
        self._models = manifest.models
        self._aliases = aliases(manifest)
        self._expected = {name: shards(model) for name, model in manifest.models.items()}
        self._found: dict[tuple[str, str], Shard] = {}

    def leave(self) -> None:
        """Keep no file: who holds one goes on, who asks for one opens it anew."""
        self._found.clear()

    def alias(self, model: str, name: str) -> bool:
        """Whether a tensor's bytes occur under another name too."""
        return (model, name) in self._aliases.get(self._models[model].tensors[name].digest, ())

    def own(self, model: str, tensor: ExportedTensor) -> Shard:
        """A model's own file of a tensor, which must be sound even if another's is read instead."""
        return self._shard(model, tensor.file)

    def place(self, model: str, tensor: ExportedTensor) -> tuple[Shard, str] | None:
        """Where a tensor that occurs under several names is read, and its name there. A model whose directory did not
        come along with this one is passed over."""
        for other, there in self._aliases.get(tensor.digest, ()):
            exported = self._models[other]
            if other == model or (self.root / exported.directory).is_dir():
                return self._shard(other, exported.tensors[there].file), there
        return None

    def _shard(self, model: str, file: str) -> Shard:
        if (model, file) not in self._found:
            self._found[model, file] = _agreeing(
                model, self.root / self._models[model].directory / file, self._expected[model][file]
            )
        return self._found[model, file]


def _agreeing(model: str, path: Path, expected: Mapping[str, ExportedTensor]) -> Shard:
    """The file, where it holds these tensors and no others."""
    try:
        shard = Shard(path)
    except FileNotFoundError:
        raise _damaged(model, path, "is a link to nothing" if path.is_symlink() else "is missing") from None
    except OSError as error:
        raise _damaged(model, path, f"cannot be read: {error.strerror or error}") from None
    except FormatError as error:
        raise _damaged(model, path, f"is no intact safetensors file: {error}") from None
    for name in sorted(shard.places.keys() | expected.keys()):
        message = _difference(shard.places.get(name), expected.get(name))
        if message:
            raise ProofError(message, model=model, file=str(path), tensor=name, remedy=RESTORE)
    return shard


def _difference(found: Place | None, expected: ExportedTensor | None) -> str | None:
    if expected is None or found is None:
        return f"is missing: {MANIFEST} has it in this file" if expected else f"is no tensor that {MANIFEST} has here"
    held, said = (found.dtype, found.shape), (expected.dtype, expected.shape)
    if held != said or found.end - found.start != expected.nbytes:
        return f"is {held[0]} {list(held[1])} in the file, {said[0]} {list(said[1])} in {MANIFEST}"
    return None


def _damaged(model: str, file: Path, message: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(message, model=model, file=str(file), tensor=tensor, remedy=RESTORE)
