"""What only a whole pool shows: who can share with whom, whether budgets can be measured, whether it fits."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Literal

import torch

from sandhi_core.checkpoints.checkpoint import resolve
from sandhi_core.checkpoints.vocabulary import TOKENIZER, token_ids
from sandhi_core.costs import Costs, besides_met, met, met_beside, total
from sandhi_core.errors import Problem, SandhiError
from sandhi_core.graph import STAGES
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from sandhi_core.pools.rules import is_fraction
from sandhi_core.preflight.adapters import never_adapters
from sandhi_core.preflight.engines import not_served
from sandhi_core.records import Fingerprint, Split
from sandhi_core.statistics import certifiable_budget, certifying_questions

Questions = Mapping[str, Mapping[str, Mapping[Split, int]]]
"""By model, task and split."""

_DECIDING: tuple[Split, ...] = ("search", "holdout")  # a budget is held against these
COARSE = 0.2
"""Smallest budget of a metric between 0 and 1 that is more likely a slip than an intention."""
_TOLERANCE = 1e-12  # of a budget that is exactly one question


def check_pool(
    pool: Pool,
    fingerprints: Mapping[str, Fingerprint],
    questions: Questions | None,
    root: Path,
    bases: Mapping[str, Fingerprint] | None = None,
) -> list[Problem]:
    """Problems between the models of a pool, and between it and the artifact root. `fingerprints` and `bases` may lack
    what has problems of its own; `questions` may lack tasks that cannot be built."""
    problems = [*_device(pool), *_task_folder(pool), *_device_memory(pool, fingerprints)]
    problems += [*_same_checkpoint(pool), *_partners(pool, fingerprints), *_tokenizers(pool, fingerprints)]
    for entry in pool.models:
        counted = (questions or {}).get(entry.name, {})
        for task in entry.tasks:
            problems += _coarse_budget(entry, task)
            if task.task in counted:
                problems += _budget(pool, entry, task, counted[task.task])
                problems += _certifiable(pool, entry, task, counted[task.task]["holdout"])
    problems += [*_fitting(pool, fingerprints, bases or {}), *never_adapters(pool, fingerprints)]
    problems += [*not_served(pool, fingerprints), *_room(pool, fingerprints, root)]
    return problems


def _problem(
    code: str,
    message: str,
    remedy: str,
    severity: Literal["error", "warning"] = "error",
    model: str | None = None,
    file: str | None = None,
) -> Problem:
    return Problem(code=code, severity=severity, model=model, file=file, message=message, remedy=remedy)


def _device(pool: Pool) -> Iterator[Problem]:
    device = pool.evaluation.device
    kind, _, number = device.partition(":")
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(number or 0) >= there:
        yield _problem(
            "device-missing",
            f"evaluation.device is {device}, which this machine lacks",
            "set evaluation.device to cpu or auto",
        )


def task_folder_is_missing(pool: Pool) -> bool:
    """Whether `evaluation.include_path` names what is no folder: then none of its tasks can be built."""
    include = pool.evaluation.include_path
    return include is not None and not Path(include).is_dir()


def _task_folder(pool: Pool) -> Iterator[Problem]:
    if task_folder_is_missing(pool):
        yield _problem(
            "include-path",
            "evaluation.include_path is no folder",
            "name the folder of the task files",
            file=pool.evaluation.include_path,
        )


def _device_memory(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    device = pool.deploy.device_bytes
    for model, fingerprint in fingerprints.items():
        if device < fingerprint.nbytes:
            yield _problem(
                "device-memory",
                f"its weights take {fingerprint.nbytes / 2**30:.3g} GiB, which is more than deploy.device_memory "
                f"({pool.deploy.device_memory}): it fits no such device, with or without the others",
                "set deploy.device_memory to that of the devices that will serve the pool",
                "warning",
                model,
            )


def _same_checkpoint(pool: Pool) -> Iterator[Problem]:
    first: dict[Path | tuple[str, str | None], str] = {}
    for entry in pool.models:
        try:
            where: Path | tuple[str, str | None] = resolve(entry).resolve()
        except (SandhiError, OSError, RuntimeError):  # not in the cache, a loop of links: reported with the model
            where = (entry.path, entry.revision)
        if (other := first.setdefault(where, entry.name)) != entry.name:
            yield _problem(
                "same-checkpoint",
                f"is the checkpoint of {other} under another name: of the same bytes twice nothing is to be learnt",
                f"remove it, and give {other} the tasks of both; or correct the path",
                "warning",
                entry.name,
            )


def _partners(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    """Models none of whose projections another model has in the same shape, dtype and meaning, nor where the pool asks
    for it anything beside them."""
    beside = met_beside(fingerprints) if pool.grouping.besides else set()
    keys = {model: {slot.key for slot in f.slots} for model, f in fingerprints.items()}
    for model, own in keys.items():
        if model in beside:
            continue
        if len(pool.models) == len(keys) and not any(own & theirs for m, theirs in keys.items() if m != model):
            alone = "is the only model" if len(keys) == 1 else "agrees with no other model in any projection"
            yield _problem(
                "no-partner",
                f"{alone}, so it can share nothing but exact duplicates",
                "serve it on its own, or add models of its shape, dtype and configuration",
                "warning",
                model,
            )


def _fitting(
    pool: Pool, fingerprints: Mapping[str, Fingerprint], bases: Mapping[str, Fingerprint]
) -> Iterator[Problem]:
    """Bases that no two models could share a matrix of."""
    met = Counter((s.layer, s.key) for f in fingerprints.values() for s in f.slots)
    for name, base in bases.items():
        if len(pool.models) == len(fingerprints) and all(met[s.layer, s.key] < 2 for s in base.slots):
            yield _problem(
                "base-fits-nothing",
                "has no matrix of the shape, dtype and meaning that two models of the pool have in its layer",
                "name the checkpoint that they were trained from, in their dtype; or leave it out",
                model=name,
            )


# --- tokenizers ---------------------------------------------------------------------------------------------


def _tokenizers(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    """For each model the first partner before it whose tokens have other numbers."""
    entries = [e for e in pool.models if TOKENIZER in (f.files if (f := fingerprints.get(e.name)) else ())]
    keys = {e.name: {s.key for s in fingerprints[e.name].slots} for e in entries}
    files = {e.name: fingerprints[e.name].files[TOKENIZER] for e in entries}
    numbers: dict[str, str] = {}  # by sha256 of the file: a digest, since the tokens of many models fill memory
    told: set[str] = set()
    for one, other in combinations(entries, 2):
        if other.name in told or files[one.name] == files[other.name] or keys[one.name].isdisjoint(keys[other.name]):
            continue
        for entry in (one, other):
            if files[entry.name] not in numbers:
                numbers[files[entry.name]] = hashlib.sha256(
                    json.dumps(_ids(entry), sort_keys=True).encode()
                ).hexdigest()
        if numbers[files[one.name]] != numbers[files[other.name]]:
            told.add(other.name)
            yield _problem(
                "tokenizer-differs",
                f"numbers {_differences(_ids(one), _ids(other))} tokens otherwise than that of {one.name}: their "
                "embeddings and heads cannot be compared, and their projections have seen different input",
                "nothing; expect them to share less, as the search will tell",
                "warning",
                other.name,
                str(resolve(other) / TOKENIZER),
            )


def _ids(entry: ModelEntry) -> dict[str, int]:
    try:
        return token_ids(resolve(entry) / TOKENIZER)
    except (SandhiError, ValueError, OSError):  # reported with the model itself
        return {}


def _differences(one: dict[str, int], other: dict[str, int]) -> int:
    return sum(one.get(token) != other.get(token) for token in one.keys() | other.keys())


# --- budgets ------------------------------------------------------------------------------------------------


def _budget(pool: Pool, entry: ModelEntry, task: TaskBudget, counted: Mapping[Split, int]) -> Iterator[Problem]:
    """A budget must allow at least one question of the split to be lost, or it allows nothing."""
    least = max((1 / counted[split] for split in _DECIDING if counted.get(split)), default=1.0)
    for split, count in counted.items():
        fraction: float = getattr(pool.evaluation.splits, split)
        if count == 0:
            yield _problem(
                "no-questions",
                f"no question of task {task.task} falls into the {split} split",
                "give the task more questions, or the split a larger fraction",
                model=entry.name,
            )
        elif split in _DECIDING and task.budget < 1 / count - _TOLERANCE:
            needed = ceil(1 / task.budget - _TOLERANCE)
            yield _problem(
                "budget-too-fine",
                f"budget {task.budget:g} of task {task.task} is finer than one of the {count} questions of the "
                f"{split} split; that takes {needed} there, about {ceil(needed / fraction)} in all",
                f"give the task that many questions, or a budget of at least {least:.4g}",
                model=entry.name,
            )


def _certifiable(pool: Pool, entry: ModelEntry, task: TaskBudget, count: int) -> Iterator[Problem]:
    """Of right-or-wrong answers it is known beforehand what so many can certify at best."""
    wanted = pool.holdout.quality == "certified" and is_fraction(task.metric) and count > 0
    if wanted and task.budget < certifiable_budget(count):
        needed = certifying_questions(task.budget)
        yield _problem(
            "budget-uncertifiable",
            f"budget {task.budget:g} of task {task.task} cannot be certified by the {count} questions of the holdout "
            f"split; that takes {needed} there, about {ceil(needed / pool.evaluation.splits.holdout)} in all",
            f"give the task that many questions, a budget of at least {certifiable_budget(count):.4g}, "
            "or set holdout.quality: point",
            model=entry.name,
        )


def _coarse_budget(entry: ModelEntry, task: TaskBudget) -> Iterator[Problem]:
    """(A budget of 1 or more of such a metric is refused with the pool file.)"""
    if is_fraction(task.metric) and task.budget >= COARSE:
        yield _problem(
            "budget-coarse",
            f"budget {task.budget:g} lets {task.metric} of task {task.task} fall by {100 * task.budget:g} points",
            "nothing, if that is meant; 0.05 is five points",
            "warning",
            entry.name,
        )


# --- room ---------------------------------------------------------------------------------------------------


def _room(pool: Pool, fingerprints: Mapping[str, Fingerprint], root: Path) -> Iterator[Problem]:
    """Whether the artifact root can be written and will take what a build writes."""
    existing = next(p for p in (root.absolute(), *root.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield _problem(
            "root-unwritable",
            "cannot be written",
            "give write permission, or choose another artifact root with --root",
            file=str(existing),
        )
        return
    least, costs = _least_written(pool, fingerprints), Costs(pool, fingerprints, grouped=fingerprints)
    most = total(costs.of(stage, fingerprints) for stage in STAGES).bytes_written
    free = shutil.disk_usage(existing).free
    if free < most:
        yield _problem(
            "disk-space",
            f"has {free / 2**30:.2f} GiB free; exports take from {least / 2**30:.2f} GiB, where everything "
            f"that could be shared is, to {most / 2**30:.2f} GiB, where nothing is",
            "free space, or choose an artifact root on another disk with --root",
            "error" if free < least else "warning",
            file=str(existing),
        )


def _least_written(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> int:
    """Bytes of an export at least: where all that is met in two models goes. Of what is no projection, where it may be
    shared, that is all with one name and shape."""
    tensors = {t.digest: t.nbytes for f in fingerprints.values() for t in f.tensors}
    could_go = {slot.digest for slots in met(fingerprints.values()).values() for slot in slots}
    if pool.grouping.besides:
        could_go |= {t.digest for alike in besides_met(fingerprints.values()) for t in alike}
    return sum(n for digest, n in tensors.items() if digest not in could_go)
