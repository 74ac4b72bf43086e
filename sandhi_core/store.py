"""Content-addressed tensors: written once, read-only, never changed in place (docs/format.md, "Store").

    store/DIGEST/NAME.safetensors         one tensor under the name it has in a checkpoint
    store/DIGEST/2MiB/NAME.safetensors    the same, wider aligned, where an export asked for it
    store/recipes/DIGEST.json             which tensor a recipe gave

An entry is an ordinary safetensors file with one tensor, so that a shard of an exported checkpoint can be a
hard link to it: every process that opens any such link maps the same pages. The same bytes under another name
are another file of the same directory, because a checkpoint has no other way to name a tensor.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import (
    Entry,
    FormatError,
    UnreadError,
    dtype_name,
    map_file,
    raw_bytes,
    release,
    tensor_over,
    write_safetensors,
)
from sandhi_core.errors import StoreError
from sandhi_core.files import write_atomic, writing
from sandhi_core.records import canonical_json
from sandhi_core.savings import PAGE_ALIGNED

ALIGNMENT = PAGE_ALIGNED  # bytes: a page, so that the data of an entry can be mapped without its header
_FOLDERS = {ALIGNMENT: "", 2 << 20: "2MiB"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,239}")
_SUFFIX = ".safetensors"


class Store:
    """The tensors below `root`; those that it writes are aligned to `alignment` bytes, 4096 or 2 MiB. Any number of
    processes may read and write at once."""

    def __init__(self, root: Path, alignment: int = ALIGNMENT) -> None:
        self.root = root
        self._alignment = alignment

    def path(self, digest: str, name: str) -> Path:
        """Where the tensor lies under that name, whether or not it is there.

        Raises StoreError where the name cannot be a file's.
        """
        if not _NAME.fullmatch(name):
            raise StoreError(
                "the name cannot be a file name",
                tensor=name,
                remedy="leave this tensor private; shared ones have letters, digits, '.', '_' and '-' only",
            )
        return self.root / digest / _FOLDERS[self._alignment] / f"{name}{_SUFFIX}"

    def put(self, name: str, tensor: Tensor) -> str:
        """Keep a CPU tensor and return its digest. Raises StoreError where the root cannot be written."""
        return self.put_raw(name, dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))

    def put_raw(self, name: str, dtype: str, shape: Sequence[int], raw: memoryview) -> str:
        """`put` for bytes that are somewhere already, streamed. A damaged entry is replaced by a new file. Raises
        UnreadError too, where `raw` is mapped and cannot be read."""
        digest = tensor_digest(dtype, shape, raw)
        path = self.path(digest, name)
        if not self._intact(path, digest, name):
            with writing(path, raw.nbytes):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_safetensors(path, [Entry(name, dtype, tuple(shape), raw)], alignment=self._alignment)
        return digest

    def provide(self, digest: str, name: str) -> Path:
        """The file of the tensor under that name, read back and right to the byte; made from the same bytes
        under another name where there is none.

        Raises StoreError where no intact entry holds the digest.
        """
        path = self.path(digest, name)
        if not self._intact(path, digest, name):
            entry = self.entry(digest)
            try:
                self.put_raw(name, entry.dtype, entry.shape, entry.raw)
            except UnreadError:
                raise self.unread(digest) from None
        return path

    def entry(self, digest: str) -> Entry:
        """The tensor's bytes, checked, over a mapping. Raises StoreError where no intact entry holds it."""
        paths = self._entries(digest)
        for path in paths:
            name = path.name.removesuffix(_SUFFIX)
            if self._intact(path, digest, name):
                return map_file(path)[name]
        raise self._lost(digest, "every entry of this tensor is damaged" if paths else "no such tensor in the store")

    def unread(self, digest: str) -> StoreError:
        """What to raise where an entry was sound, and cannot be read now that its bytes are asked for."""
        return self._lost(digest, str(UnreadError()))

    def _lost(self, digest: str, message: str) -> StoreError:
        remedy = "remove this directory and build again: it is made anew from the checkpoints"
        return StoreError(message, file=str(self.root / digest), remedy=remedy)

    def tensor(self, digest: str) -> Tensor:
        """The tensor as a read-only view of its file. Raises StoreError as `entry` does."""
        entry = self.entry(digest)
        return tensor_over(entry.dtype, entry.shape, entry.raw)

    def recipe_tensor(self, recipe: str) -> str | None:
        """The digest of the tensor that a recipe (by its digest) gave, if that tensor is still here."""
        try:
            remembered = json.loads(self._recipe(recipe).read_bytes())
            if remembered["recipe"] != recipe:
                return None
            digest = str(remembered["tensor"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return digest if self.has(digest) else None

    def has(self, digest: str) -> bool:
        """Whether there is an entry of the tensor, intact or not."""
        return bool(self._entries(digest))

    def remember_recipe(self, recipe: str, digest: str) -> None:
        """Record that a recipe gave a tensor. Raises StoreError where the root cannot be written."""
        path = self._recipe(recipe)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, canonical_json({"recipe": recipe, "tensor": digest}))

    def _entries(self, digest: str) -> list[Path]:
        """Its files, of every alignment and name."""
        folders = [self.root / digest / folder for folder in _FOLDERS.values()]
        return [path for folder in folders for path in sorted(folder.glob(f"[!.]*{_SUFFIX}"))]

    def _recipe(self, recipe: str) -> Path:
        return self.root / "recipes" / f"{recipe}.json"

    @staticmethod
    def _intact(path: Path, digest: str, name: str) -> bool:
        try:
            entries = map_file(path)
            if list(entries) != [name]:
                return False
            _, dtype, shape, raw = entries[name]
            found = tensor_digest(dtype, shape, raw)
        except (OSError, FormatError):
            return False
        release(raw)
        return found == digest
