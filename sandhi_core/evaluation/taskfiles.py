"""Which files define a local lm-eval task, found without importing lm-eval: what decides that a task changed."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from sandhi_core.errors import TaskError


@dataclass(frozen=True)
class _Function:
    name: str


class _Loader(yaml.SafeLoader):
    """Reads task YAML without importing the functions it names."""


_Loader.add_constructor("!function", lambda loader, node: _Function(str(node.value)))


def find_task(include: Path | None, task: str) -> Path | None:
    """The YAML file below `include` that defines `task`; None where lm-eval itself has to know it."""
    if include is None:
        return None
    found = [path for path in sorted(include.glob("**/*.yaml")) if _read(path).get("task") == task]
    if len(found) > 1:
        raise TaskError(
            f"task {task!r} is defined {len(found)} times below {include}",
            file=str(found[1]),
            remedy="rename one of them",
        )
    return found[0] if found else None


def task_files(include: Path | None, task: str) -> tuple[Path, ...]:
    """The task's YAML, what it includes, the functions' modules and the local data files; empty for a task of
    lm-eval's own."""
    path = find_task(include, task)
    return () if path is None else tuple(dict.fromkeys(_files_of(path)))


def task_identity(include: Path | None, task: str) -> str:
    """Digest over the contents of the task's files, or over the name and lm-eval's version for its own tasks."""
    digest = hashlib.sha256(f"{task}\nlm_eval {version('lm_eval')}\n".encode())
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


def local_data_files(data_files: Any, folder: Path) -> Any:
    """`data_files` of a dataset with names that exist beside the YAML made absolute, in the same structure."""
    if isinstance(data_files, dict):
        return {split: local_data_files(files, folder) for split, files in data_files.items()}
    if isinstance(data_files, list):
        return [local_data_files(files, folder) for files in data_files]
    beside = folder / str(data_files)
    return str(beside) if beside.is_file() else data_files


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return {}  # not a task; a broken file is named when its own task is asked for and not found
    return content if isinstance(content, dict) else {}


def _files_of(path: Path) -> Iterator[Path]:
    yield path
    content = _read(path)
    for value in _values(content):
        if isinstance(value, _Function):
            module = path.parent / f"{value.name.rpartition('.')[0].replace('.', '/')}.py"
            if module.is_file():
                yield module
    for data in _values(local_data_files((content.get("dataset_kwargs") or {}).get("data_files"), path.parent)):
        if isinstance(data, str) and Path(data).is_absolute():
            yield Path(data)
    include = content.get("include")
    for name in include if isinstance(include, list) else [include] if include else []:
        included = path.parent / str(name)
        if included.is_file() and included != path:
            yield from _files_of(included)


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner)
    else:
        yield value
