"""Questions as lm-eval asks them: built once in a process, reused for every set of weights and every model."""

import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from sandhi_core.errors import TaskError
from sandhi_core.evaluation.taskfiles import find_task, local_data_files, task_names
from sandhi_core.files import FULL, unwritable

GENERATION = "generate_until"


@dataclass(frozen=True)
class Question:
    """One document with its requests, in lm-eval's order."""

    document: Mapping[str, Any]
    requests: tuple[Instance, ...]


@dataclass(frozen=True)
class Asked:
    """lm-eval's task with all its questions in lm-eval's order. `digest` covers every document and request."""

    task: Any
    questions: tuple[Question, ...]
    digest: str


@lru_cache(maxsize=64)
def ask(include: Path | None, name: str, seed: int, cache_directory: Path, identity: str) -> Asked:
    """Build a task's requests. `identity` (taskfiles.task_identity) is part of the key, so that an edited task
    is built anew; `seed` draws few-shot examples; what the datasets library makes of local data files goes
    below `cache_directory`.

    Raises TaskError for a task that does not exist, cannot be built, or samples its answers; StoreError where
    `cache_directory` cannot be written.
    """
    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # A data set is found again by path and time, which an edit can leave as they were; the identity cannot.
    aside = cache_directory / identity[:16]
    try:
        _seed_generators()
        task = _lm_eval_task(include, name, aside)
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
        task.build_all_requests()
    except TaskError:
        raise
    except (Exception, SystemExit) as error:  # task files and their functions can fail in any way
        if disk := _of_disk(error, cache_directory):
            raise unwritable(cache_directory, disk) from error
        raise TaskError(
            f"lm-eval cannot build task {name!r}: {_reason(error)}",
            file=str(find_task(include, name) or "") or None,
            remedy="correct the task file or its data; `lm_eval validate` checks task files",
        ) from error
    _refuse_sampling(name, task.instances)
    questions = _questions(task.instances)
    return Asked(task, questions, _digest(questions))


def _of_disk(error: BaseException | None, folder: Path) -> OSError | None:
    """The failure to write into `folder` that an error goes back to, if it does."""
    while error is not None:
        below = isinstance(error, OSError) and str(error.filename or "").startswith(str(folder))
        if isinstance(error, OSError) and (below or error.errno in FULL):
            return error
        error = error.__cause__ or error.__context__
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, StopIteration):  # what the data sets library makes of files without a row
        return "its data hold no question"
    if isinstance(error, SystemExit):
        return f"its code ended the process (SystemExit: {error})"
    return " ".join(str(error).split()) or type(error).__name__


def _seed_generators() -> None:
    """As lm_eval.simple_evaluate does by default: tasks may shuffle choices with the global generators."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


def _lm_eval_task(include: Path | None, name: str, cache_directory: Path) -> Any:
    path = find_task(include, name)
    if path is not None:
        config = load_yaml(path)
        if "data_files" in (config.get("dataset_kwargs") or {}):
            local = {"data_files": local_data_files(path), "cache_dir": str(cache_directory)}
            config["dataset_kwargs"] = config["dataset_kwargs"] | local
        return TaskManager(include_defaults=False).load([config])["tasks"][name]
    manager = _own_tasks()
    if name not in manager.all_subtasks:
        where = f"neither below {include} nor among lm-eval's own" if include else "not among lm-eval's own"
        kind = "is a group of tasks" if name in manager.all_tasks else f"is {where}"
        known = [*task_names(include), *manager.all_subtasks]  # the pool's own first
        meant = [] if name in manager.all_tasks else get_close_matches(name, known, n=1, cutoff=0.75)
        remedy = "name a single task, and set evaluation.include_path to its folder"
        raise TaskError(f"task {name!r} {kind}", remedy=f"did you mean {meant[0]}?" if meant else remedy)
    return manager.load([name])["tasks"][name]


@cache
def _own_tasks() -> Any:
    """lm-eval's own tasks; reading their thousands of files takes seconds."""
    return TaskManager()


def _refuse_sampling(name: str, requests: Iterable[Instance]) -> None:
    """A search compares scores to single questions; sampled answers would differ with the same weights."""
    for request in requests:
        if request.repeats != 1:
            raise TaskError(f"task {name!r} repeats its requests", remedy="set repeats to 1 in the task")
        if request.request_type == GENERATION:
            settings = request.args[1]
            if settings.get("do_sample") or (settings.get("temperature") or 0) > 0:
                raise TaskError(
                    f"task {name!r} samples its answers",
                    remedy="set do_sample to false and temperature to 0 in the task's generation_kwargs",
                )


def _questions(requests: Iterable[Instance]) -> tuple[Question, ...]:
    by_document: dict[int, list[Instance]] = defaultdict(list)
    for request in requests:
        by_document[request.doc_id].append(request)
    return tuple(
        Question(asked[0].doc, tuple(sorted(asked, key=lambda request: request.idx)))
        for _, asked in sorted(by_document.items())
    )


def _digest(questions: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for question in questions:
        requests = [(request.request_type, request.arguments) for request in question.requests]
        digest.update(repr((question.document, requests)).encode())
    return digest.hexdigest()
