"""Proof of sharing: exported is scored, and what is claimed as saved is saved, on disk and in memory.

Three claims, each measured for itself: the files hold what was scored (digest by digest, and transformers, with what
models add to shared tensors, answers the holdout from them as the scored weights did); the files share (tensor bytes
by inode); processes that load the files share (proportional set size).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sandhi_core.assignment import Assignment, parts_of
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.claims import least_in_memory
from sandhi_core.disk import verify_disk
from sandhi_core.errors import Problem
from sandhi_core.layout import read_manifest
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

Answers = Callable[[str, Path], Mapping[str, TaskResult]]

Compare = Callable[[Mapping[str, Path], Path, Manifest], MemoryComparison]


def prove(
    merged: MergedWeights,
    root: Path,
    checkpoints: Mapping[str, Checkpoint],
    fingerprints: Mapping[str, Fingerprint],
    assignments: Mapping[str, Assignment],
    savings: Savings,
    expected: Mapping[str, Evaluation],
    answers: Answers,
    compared_by: Compare,
) -> SharingProof:
    """Prove the export `merged` below the artifact root; all mappings by model name.

    `assignments` are what was scored in place of the models' own tensors, `expected` how it answered the holdout,
    `answers` has transformers answer the same questions from a directory, `compared_by` serves the originals, by model,
    and the export at a root. Where the files already
    differ nothing is loaded from them. Saved in memory beyond the claim (pages are whole) is not counted. What does
    not hold is a problem of the proof, which then did not pass;
    raises ProofError only where the export has no manifest, and what `answers` and `compared_by` raise of one that
    cannot be loaded or served at all.
    """
    export_root = root / merged.export
    manifest = read_manifest(export_root)
    disk = verify_disk(export_root, manifest)
    problems = [*map(_told, disk.problems), *_not_scored(manifest, merged, fingerprints, assignments, expected)]
    checked, equal = dict.fromkeys(expected, 0), dict.fromkeys(expected, 0)
    compared = MemoryComparison(engine="not measured: the files differ", originals=(), exports=(), shared=0, saved=0)
    originals = sum(c.header(name).nbytes for c in checkpoints.values() for name in c.names)
    verified_disk = originals - disk.distinct_bytes if not disk.problems else 0
    if not problems:
        for name, model in manifest.models.items():
            checked[name], equal[name] = _same_answers(expected[name], answers(name, export_root / model.directory))
        compared = compared_by({name: c.directory for name, c in checkpoints.items()}, export_root, manifest)
        problems += _wrong_answers(checked, equal)
        problems += _not_saved(savings.net, verified_disk, compared, manifest)
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
        verified_memory=max(min(compared.saved, compared.shared, savings.net), 0),
        memory=compared,
    )


def _not_scored(
    manifest: Manifest,
    merged: MergedWeights,
    fingerprints: Mapping[str, Fingerprint],
    assignments: Mapping[str, Assignment],
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
        scored = _scored(fingerprint, assignments.get(name, Assignment()))
        if model.weights != expected[name].weights:
            yield f"model {name}: exported as {model.weights}, scored as {expected[name].weights}"
        if {n: t.digest for n, t in model.tensors.items()} != scored:
            yield f"model {name}: the exported tensors are not the scored ones"
        if model.files != fingerprint.files:
            yield f"model {name}: the exported files are not those of the checkpoint"


def _scored(fingerprint: Fingerprint, assignment: Assignment) -> dict[str, str]:
    """By tensor name the digest of what was scored, residuals included."""
    scored = {t.name: assignment.tensors.get(t.name, t.digest) for t in fingerprint.tensors}
    for tensor, added in assignment.adjustments.items():
        scored |= parts_of(tensor, added)
    return scored


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
                f"model {name}: transformers answers {equal[name]} of {count} holdout questions "
                "as the scored weights did"
            )


def _not_saved(claimed: int, on_disk: int, in_memory: MemoryComparison, manifest: Manifest) -> Iterator[str]:
    if on_disk != claimed:
        ways = ", ".join(sorted({m.linked for m in manifest.models.values()}))
        yield (
            f"{claimed} bytes are claimed, the files save {on_disk} (linked by {ways}; only one file under "
            "several names is shared: keep the artifact root on one file system with hard links)"
        )
    least = least_in_memory(claimed, manifest)
    if in_memory.shared < least:
        yield f"{claimed} bytes are claimed, processes that load the export share {in_memory.shared}"
    if in_memory.saved < least:
        yield f"{claimed} bytes are claimed, processes that load the export save {in_memory.saved}"


def _told(problem: Problem) -> str:
    """A problem as a proof's record has it: where, and what."""
    where = ", ".join(f"{k} {v}" for k in ("model", "file", "tensor") if (v := getattr(problem, k)))
    return f"{where}: {problem.message}"
