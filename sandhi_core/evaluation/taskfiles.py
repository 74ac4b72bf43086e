"""Which files define a local lm-eval task, found without importing lm-eval: what decides that a task changed."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sandhi_core.errors import TaskError

_LOCAL = ("json", "csv", "parquet", "text", "arrow", "pandas")
"""`dataset_path`s of which the data files are named by the task; others have them in a repository of their own."""


@dataclass(frozen=True)
class _Function:
    name: str


class _Loader(yaml.SafeLoader):
    """Reads task YAML without importing the functions it names."""


_Loader.add_constructor("!function", lambda loader, node: _Function(str(node.value)))


@cache
def installed(package: str) -> str:
    """The version of a package. It is asked for at every look at the graph, and reading it takes milliseconds."""
    return version(package)


def find_task(include: Path | None, task: str) -> Path | None:
    """The YAML file below `include` that defines `task`; None where lm-eval itself has to know it.

    Raises TaskError where two files define it, or where the file that does is no YAML.
    """
    if include is None:
        return None
    if not include.is_dir():
        raise TaskError(
            "evaluation.include_path is no folder", file=str(include), remedy="name the folder of the task files"
        )
    # Folders of tasks hold thousands of files: parse only those that say the name.
    stated = re.compile(rf"""\btask["']?\s*:\s*["']?{re.escape(task)}["']?\s*($|[#,}}])""", re.MULTILINE)
    files = sorted(include.glob("**/*.yaml"))
    found = [path for path in files if stated.search(_text(path)) and _content(path).get("task") == task]
    if len(found) > 1:
        raise TaskError(
            f"task {task!r} is defined {len(found)} times below {include}",
            file=str(found[1]),
            remedy="rename one of them",
        )
    return found[0] if found else None


def task_names(include: Path | None) -> list[str]:
    """What the files below `include` seem to define, by a glance at their text: to tell what a mistyped name meant."""
    stated = re.compile(r"""^task["']?\s*:\s*["']?([\w.-]+)["']?\s*($|#)""", re.MULTILINE)
    files = () if include is None else sorted(include.glob("**/*.yaml"))
    return list(dict.fromkeys(name for path in files for name, _ in stated.findall(_text(path))))


def task_files(include: Path | None, task: str) -> tuple[Path, ...]:
    """The task's YAML, what it includes, the functions' modules and the local data files; empty for a task of
    lm-eval's own. Raises TaskError where a local data file is not there."""
    path = find_task(include, task)
    if path is None:
        return ()
    chain = list(_chain(path))
    modules = (module for file, content in chain for module in _modules(file, content))
    named = _data_files(chain)
    data = (found for name in _names(named.files) for found in _beside(name, named))
    return tuple(dict.fromkeys([*(file for file, _ in chain), *modules, *data]))


def task_identity(include: Path | None, task: str) -> str:
    """Digest over the contents of the task's files, or over the name and lm-eval's version for its own tasks.

    Raises TaskError where a file cannot be read or is not there.
    """
    digest = hashlib.sha256(f"{task}\nlm_eval {installed('lm_eval')}\n".encode())
    for path in task_files(include, task):
        digest.update(f"{path.name}\n".encode())
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise TaskError(
                f"task {task!r} names a file that cannot be read: {error.strerror}",
                file=str(path),
                remedy="restore the file or correct the task",
            ) from None
    return digest.hexdigest()


def local_data_files(path: Path) -> Any:
    """The `data_files` of the task in `path`, in the structure they are written in, with names and patterns
    that exist beside the file that states them made absolute (lm-eval looks in the current directory).

    Raises TaskError where a local data file is not there, or empty."""
    named = _data_files(list(_chain(path)))
    return _absolute(named.files, named)


class _DataFiles(NamedTuple):
    """What lm-eval takes as `data_files`, the folder of the file that states them, and whether they must be
    there."""

    files: Any
    folder: Path
    local: bool


def _data_files(chain: list[tuple[Path, dict[str, Any]]]) -> _DataFiles:
    local = next((content["dataset_path"] for _, content in chain if "dataset_path" in content), None) in _LOCAL
    for file, content in chain:
        if "dataset_kwargs" in content:
            kwargs = content["dataset_kwargs"]
            files = kwargs.get("data_files") if isinstance(kwargs, dict) else None
            return _DataFiles(files, file.parent.absolute(), local)
    return _DataFiles(None, chain[0][0].parent, local)


def _absolute(files: Any, named: _DataFiles) -> Any:
    if isinstance(files, dict):
        return {split: _absolute(inner, named) for split, inner in files.items()}
    if isinstance(files, list):
        return [_absolute(inner, named) for inner in files]
    found = [] if files is None else _beside(files, named)
    if found and not any(path.stat().st_size for path in found):
        remedy = "put the task's questions there"
        raise TaskError(f"the task's data file {str(files)!r} is empty", file=str(found[0]), remedy=remedy)
    return str(named.folder / str(files)) if found else files


def _beside(name: Any, named: _DataFiles) -> list[Path]:
    """Files that a name or pattern means, none where it leads elsewhere."""
    found = _matches(name, named.folder)
    if not found and named.local and "://" not in str(name):
        # lm-eval would look from the current directory: another file for everyone, and none that we would notice.
        raise TaskError(
            f"the task's data file {str(name)!r} is not beside it",
            file=str(named.folder),
            remedy="put it there, or name it relative to the task's folder",
        )
    return found


def _matches(name: Any, folder: Path) -> list[Path]:
    """Files that a name or pattern means, seen from `folder`."""
    beside = folder / str(name)
    if beside.is_file() or not str(name):
        return [beside] if beside.is_file() else []
    return sorted(p for p in Path(beside.anchor).glob(str(beside.relative_to(beside.anchor))) if p.is_file())


def _modules(file: Path, content: dict[str, Any]) -> Iterator[Path]:
    for value in _names(content):
        if isinstance(value, _Function):
            module = file.parent / f"{value.name.rpartition('.')[0].replace('.', '/')}.py"
            if module.is_file():
                yield module


def _chain(path: Path, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A task file and what it includes, those first whose keys win. (A circle is left to lm-eval to refuse.)"""
    if path.resolve() in seen:
        return
    content = _content(path)
    yield path, content
    include = content.get("include") or []
    for name in reversed(include if isinstance(include, list) else [include]):
        yield from _chain(path.parent / str(name), seen | {path.resolve()})


def _names(value: Any) -> Iterator[Any]:
    """All leaves of a structure but None."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _names(inner)
    elif value is not None:
        yield value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _content(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise TaskError(
            f"the task file cannot be read: {' '.join(str(error).split())}",
            file=str(path),
            remedy="correct the file, or the `include` that names it",
        ) from None
    return content if isinstance(content, dict) else {}
