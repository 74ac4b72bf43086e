"""The files of a checkpoint directory: which there are, which can be read, and what is wrong with them."""

import fnmatch
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sandhi_core.errors import Problem
from sandhi_core.files import open_regular

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
UNREAD = (*PICKLES, "*.gguf", "*.ggml", "*.h5", "*.msgpack", "*.onnx", "*.npz")
"""Files that hold weights in formats that are not read here."""

INDEX = "model.safetensors.index.json"
ADJUSTED_INDEX = "sandhi.index.json"
"""Of an export that adds residuals to shared tensors: loaders that would drop these find no weights at all."""
SUFFIXES = {INDEX: ".safetensors", ADJUSTED_INDEX: ".sandhi"}
"""Of the weight files that an index names; safetensors files, all of them. Where the index has no name that they know
some loaders read every *.safetensors and pass over tensors without a place, so residuals lie in none."""
WEIGHTS = (*UNREAD, *(f"*{suffix}" for suffix in SUFFIXES.values()), "*.index.json")
"""Files that hold or index weights: never copied beside an export's own."""

DOWNLOAD = "download it again: `hf download`, or `git lfs pull` in a clone"
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_LFS = b"version https://git-lfs"
_LFS_BYTES = 1024  # pointers are shorter


class HeaderEntry(NamedTuple):
    """One tensor as a header describes it; its bytes begin at `start` of `file` (a name in the directory)."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int


class FileIdentity(NamedTuple):
    """Changes whenever a file is written or replaced."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass
class Survey:
    """What was found. Where `survey` reports no problem, the rest is complete."""

    directory: Path
    model: str
    index_name: str  # what the file that lists the tensors of several shards is called
    problems: list[Problem] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, HeaderEntry] = field(default_factory=dict)  # by name, sorted
    weights: dict[str, FileIdentity] = field(default_factory=dict)  # the files that hold the tensors
    index: str | None = None  # the file that lists them, if they are several
    shard_of: dict[str, str] = field(default_factory=dict)  # what it says
    complete: bool = False  # every weight file was there and its header could be read
    beside: tuple[str, ...] = ()  # every file that holds no weights and does not index them
    ignored: tuple[str, ...] = ()  # weights in formats that are not read

    def report(
        self,
        code: str,
        message: str,
        remedy: str,
        file: str | None = None,
        tensor: str | None = None,
        severity: Literal["error", "warning"] = "error",
    ) -> None:
        self.problems.append(
            Problem(
                code=code,
                severity=severity,
                model=self.model,
                file=file,
                tensor=tensor,
                message=message,
                remedy=remedy,
            )
        )

    def located(self, problem: Problem) -> Problem:
        """The problem with the whole path of its file; of a tensor that is in none, of the file that lists all."""
        file = problem.file
        if file is None and problem.tensor is not None:
            file = self.index or next(iter(self.weights), None)
        return problem.model_copy(update={"file": file and str(self.directory / file)})


def matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(Path(file).name.lower(), p) for p in patterns)


def listing(found: Survey) -> list[str]:
    """Every file below the directory, relative and sorted. Hidden directories (.git, .cache) are no part of
    a model."""
    files: list[str] = []

    def unreadable(error: OSError) -> None:
        message = f"cannot be listed: {error.strerror}"
        found.report("file-unreadable", message, "give read permission", str(error.filename))

    for folder, subfolders, names in os.walk(found.directory, onerror=unreadable):
        subfolders[:] = [d for d in subfolders if not d.startswith(".") and d != "__pycache__"]
        links = [d for d in subfolders if (Path(folder) / d).is_symlink()]  # not walked into
        files += ((Path(folder) / n).relative_to(found.directory).as_posix() for n in [*names, *links])
    return sorted(files)


def readable_file(found: Survey, file: str) -> bool:
    """Whether a file can be read and is there itself, not a stand-in for it; reports why not."""
    path = found.directory / file
    if not file.isprintable():  # no text, or text that would garble a terminal
        found.report("file-name", "has a name that is not printable", "rename it", ascii(file))
        return False
    if path.is_symlink() and not path.exists():
        found.report("link-dangling", "is a link to a file that is gone", DOWNLOAD, file)
        return False
    if not path.is_file():
        message, remedy = "is neither a file nor a link to one", "move it out of the checkpoint directory"
        found.report("file-irregular", message, remedy, file)
        return False
    try:
        with path.open("rb") as f:
            head = f.read(len(_LFS))
            size = os.fstat(f.fileno()).st_size
    except OSError as error:
        found.report("file-unreadable", f"cannot be read: {error.strerror}", "give read permission", file)
        return False
    if head == _LFS and size < _LFS_BYTES:
        found.report("lfs-pointer", "is a Git LFS pointer, not the file it stands for", DOWNLOAD, file)
        return False
    return True


class _AmbiguousError(ValueError):
    """Text that some readers of JSON take, and not all alike."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise _AmbiguousError(f"{twice[:200]!r} stands twice in it: readers disagree which one counts")
    return members


def _no_number(name: str) -> None:
    raise _AmbiguousError(f"is no JSON: {name} is no number of it")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError with a reason where it is none, or one that readers take for
    different ones; OSError if unreadable."""
    with open_regular(path) as file:
        return json_object(file.read())


def json_object(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError with a reason where it is none, or one that readers take for different ones."""
    try:
        value = json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number)
        if _HALF.search(text):  # of a character: no file and no terminal takes one alone
            json.dumps(value, ensure_ascii=False).encode()
    except _AmbiguousError:
        raise
    except UnicodeEncodeError:
        raise ValueError("is no JSON that anyone wrote: holds half of a character") from None
    except ValueError as error:  # no UTF-8, no JSON, a number of thousands of digits
        raise ValueError(f"is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("is no JSON that anyone wrote: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    return value
