"""Proof of sharing: exported is scored, and what is claimed as saved is saved, on disk and in memory.

Three claims, each measured for itself: the files hold what was scored (digest by digest, and stock
transformers answers the holdout from them as the scored weights did); the files share (tensor bytes by
inode); processes that load the files share (proportional set size).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sandhi_core.checkpoint import Checkpoint
from sandhi_core.disk import DiskCheck, verify_disk
from sandhi_core.layout import DEPLOYMENT, read_manifest, shards
from sandhi_core.memory import ENGINE, PAGE, compare, measure
from sandhi_core.records import (
    Evaluation,
    Fingerprint,
    Manifest,
    MemoryComparison,
    MergedWeights,
    Savings,
    SharingProof,
    TaskResult,
)

ANSWER_TOLERANCE = 1e-4
"""Slack of one question's value: log-likelihoods in fp32 move by up to 4e-5 with the batch they are in. It is
none for a right or wrong answer (0 or 1)."""

MEMORY_SHARE = 0.9
"""Part of the claimed bytes that processes must be seen to save."""

Answers = Callable[[str, Path], Mapping[str, TaskResult]]


def prove(
    merged: MergedWeights,
    root: Path,
    checkpoints: Mapping[str, Checkpoint],
    fingerprints: Mapping[str, Fingerprint],
    tensors: Mapping[str, Mapping[str, str]],
    savings: Savings,
    expected: Mapping[str, Evaluation],
    answers: Answers,
    compared_by: Callable[[Mapping[str, Path], Mapping[str, Path]], MemoryComparison] = compare,
) -> SharingProof:
    """Prove the export `merged` below the artifact root; all mappings by model name.

    `tensors` is what was scored in place of the models' own tensors, `expected` how it answered the holdout,
    `answers` has stock transformers answer the same questions from a directory. Where the files already
    differ nothing is loaded from them. What does not hold is a problem of the proof, which then did not pass;
    raises ProofError only where the export has no manifest or cannot be loaded at all.
    """
    export_root = root / merged.export
    manifest = read_manifest(export_root)
    disk = verify_disk(export_root, manifest)
    problems = [*disk.problems, *_not_scored(manifest, merged, fingerprints, tensors, expected)]
    checked, equal = dict.fromkeys(expected, 0), dict.fromkeys(expected, 0)
    compared = MemoryComparison(engine="not measured: the files differ", originals=(), exports=(), saved=0)
    originals = sum(c.header(name).nbytes for c in checkpoints.values() for name in c.names)
    verified_disk = originals - disk.distinct_bytes if not disk.problems else 0
    if not problems:
        exported = {name: export_root / model.directory for name, model in manifest.models.items()}
        for name, directory in exported.items():
            checked[name], equal[name] = _same_answers(expected[name], answers(name, directory))
        compared = compared_by({name: c.directory for name, c in checkpoints.items()}, exported)
        problems += _wrong_answers(checked, equal)
        problems += _not_saved(savings.net, verified_disk, compared.saved, manifest)
    return SharingProof(
        pool=merged.pool,
        export=merged.export,
        manifest=merged.manifest,
        passed=not problems,
        problems=tuple(problems),
        tensors_checked=disk.tensors_checked,
        questions_checked=checked,
        questions_equal=equal,
        checkpoint_bytes=originals,
        duplicates=savings.duplicates,
        claimed=savings.net,
        verified_disk=verified_disk,
        verified_memory=compared.saved,
        memory=compared,
    )


def _not_scored(
    manifest: Manifest,
    merged: MergedWeights,
    fingerprints: Mapping[str, Fingerprint],
    tensors: Mapping[str, Mapping[str, str]],
    expected: Mapping[str, Evaluation],
) -> Iterator[str]:
    """Where the manifest speaks of other weights than those that were scored."""
    if manifest.digest != merged.manifest:
        yield f"manifest {manifest.digest} is not the exported one, {merged.manifest}"
    if manifest.models.keys() != fingerprints.keys():
        yield f"exported models are {sorted(manifest.models)}, the pool has {sorted(fingerprints)}"
        return
    for name, model in sorted(manifest.models.items()):
        fingerprint = fingerprints[name]
        scored = {t.name: tensors.get(name, {}).get(t.name, t.digest) for t in fingerprint.tensors}
        if model.weights != expected[name].weights:
            yield f"model {name}: exported as {model.weights}, scored as {expected[name].weights}"
        if {n: t.digest for n, t in model.tensors.items()} != scored:
            yield f"model {name}: the exported tensors are not the scored ones"
        if model.files != fingerprint.files:
            yield f"model {name}: the exported files are not those of the checkpoint"


def _same_answers(expected: Evaluation, found: Mapping[str, TaskResult]) -> tuple[int, int]:
    """Questions compared, and how many of them have the same value."""
    count = equal = 0
    for task, result in expected.tasks.items():
        count += len(result.questions)
        if len(found[task].questions) == len(result.questions):
            pairs = zip(result.questions, found[task].questions, strict=True)
            equal += sum(math.isclose(a, b, rel_tol=ANSWER_TOLERANCE, abs_tol=ANSWER_TOLERANCE) for a, b in pairs)
    return count, equal


def _wrong_answers(checked: Mapping[str, int], equal: Mapping[str, int]) -> Iterator[str]:
    for name, count in checked.items():
        if equal[name] != count or not count:
            yield (
                f"model {name}: stock transformers answers {equal[name]} of {count} holdout questions "
                "as the scored weights did"
            )


def _not_saved(claimed: int, on_disk: int, in_memory: int, manifest: Manifest) -> Iterator[str]:
    if on_disk != claimed:
        ways = ", ".join(sorted({m.linked for m in manifest.models.values()}))
        yield (
            f"{claimed} bytes are claimed, the files save {on_disk} (linked by {ways}; only one file under "
            "several names is shared: keep the artifact root on one file system with hard links)"
        )
    files = sum(len(shards(model)) for model in manifest.models.values())
    slack = 2 * PAGE * files  # a file's first and last page are mapped whole
    if in_memory < MEMORY_SHARE * claimed - slack:
        yield f"{claimed} bytes are claimed, processes that load the export save {in_memory}"


def verify(export_root: Path, memory: bool = False) -> tuple[dict[str, Any], bool]:
    """Check an export as it lies there, and whether all is well. The manifest must be the one that its deployment
    speaks of; without a deployment the directory's own name must be the manifest's. With `memory`, processes load
    the models and the table says what they save against each holding its files alone.

    Raises ProofError where there is no manifest, or where a sound export cannot be loaded.
    """
    found = read_manifest(export_root)
    disk = verify_disk(export_root, found)
    problems = list(disk.problems)
    wanted, named_by = _wanted(export_root)
    if not wanted or not found.digest.startswith(wanted):
        problems.append(f"the manifest is {found.digest}, {named_by} says {wanted or 'nothing'}")
    table = {
        "export": str(export_root),
        "manifest": found.digest,
        "pool": found.pool,
        "point": found.point,
        "models": {name: _row(found, name) for name in sorted(found.models)},
        "tensors_checked": disk.tensors_checked,
        "bytes": {"models": disk.tensor_bytes, "distinct": disk.distinct_bytes, "shared": disk.shared_bytes},
        "memory": None,
        "problems": problems,
    }
    if memory and not problems:
        table["memory"] = _loaded({n: export_root / m.directory for n, m in found.models.items()})
    return table, not problems


def _wanted(export_root: Path) -> tuple[str, str]:
    """The digest (or its beginning) that the manifest must have, and what says so."""
    try:
        deployment = json.loads((export_root / DEPLOYMENT).read_bytes())
        return str(deployment["manifest"]), DEPLOYMENT
    except FileNotFoundError:
        return export_root.resolve().name, "the directory's name"
    except (OSError, ValueError, TypeError, KeyError):
        return "", f"{DEPLOYMENT}, which cannot be read,"


def _row(manifest: Manifest, name: str) -> dict[str, Any]:
    model = manifest.models[name]
    kinds = {kind: [t for t in model.tensors.values() if t.sharing == kind] for kind in _KINDS}
    return {"weights": model.weights, "linked": model.linked} | {
        kind: {"tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors)} for kind, tensors in kinds.items()
    }


_KINDS = ("private", "duplicate", "merged")


def _loaded(directories: Mapping[str, Path]) -> dict[str, Any]:
    processes = measure(directories)
    return {
        "engine": ENGINE,
        "processes": {p.model: p.model_dump(exclude={"model"}) for p in processes},
        "saved": sum(p.rss - p.pss for p in processes),
    }


__all__ = ["DiskCheck", "prove", "verify", "verify_disk"]
