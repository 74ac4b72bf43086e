"""Served is scored: what servers answer, held to the evaluator that scored the weights.

The reference is the model as the search had it in memory (the original, its tensors replaced by those of the store,
residuals attached), asked by the very code that scored it; where the artifact root has no search of this export any
more, the exported files take the place of these weights.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from sandhi_core.assignment import assignment_at
from sandhi_core.deploy.launch import DTYPES
from sandhi_core.errors import ProofError, SandhiError, StoreError
from sandhi_core.evaluation.evaluator import Weights, merged_weights
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.tasks import load_tasks
from sandhi_core.layout import main_dtype
from sandhi_core.pools.pool import EvaluationSettings, Pool
from sandhi_core.records import ExportedModel, Fingerprint, Manifest, OperatingPoints, Trajectory
from sandhi_core.serving.completions import Completion
from sandhi_core.serving.engines import context_of
from sandhi_core.serving.measure import NEW_TOKENS
from sandhi_core.store import Store
from sandhi_core.verification.originals import artifacts_of, original_of

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 2**-4}
"""By dtype, how far a log-probability may be off. Engines round between other steps: in 8 bits a logit of 16 has a last
place of 1/8, and sums of many of them a few of these."""
TIE = {"float32": 2e-4, "bfloat16": 0.5, "float16": 2**-4}
"""By dtype, by how much at most the reference may prefer its own token where a server chooses another."""

TEXTS = tuple(
    f"{start} {end}"
    for start in ("The river", "In 1897 a letter", "def add(a, b):", "Once more she", "2 + 2 =", "Dear Sir,", "A: Why?")
    for end in ("", "is", "and then", "was not the", "returns", "to whom it may concern", "\n", "the last of 12")
)
"""Prompts where no pool says what its models are asked."""


class Compared(NamedTuple):
    """What servers answered against what the evaluator makes of the same tokens. `different`: greedy tokens that are
    others, `ties` of which the reference hardly disfavours (TIE). `largest`: difference of a log-probability, of
    prompts and answers."""

    reference: str
    dtype: str
    prompts: int
    tokens: int
    different: int
    ties: int
    largest: float
    equal: bool


def require_comparable(manifest: Manifest) -> None:
    """Raises ProofError where a model's weights have a dtype in which nothing is compared."""
    for name, model in sorted(manifest.models.items()):
        _compared_dtype(name, model)


def _compared_dtype(name: str, model: ExportedModel) -> str:
    """torch's name of the dtype in which a model's answers are compared: that of its files."""
    stored = main_dtype(model)
    dtype = DTYPES.get(stored)
    if dtype not in TOLERANCE:
        message = f"has weights in {stored}, and answers are compared in {', '.join(TOLERANCE)} alone"
        raise ProofError(message, model=name, remedy="leave --answers out: memory is measured in any dtype")
    return dtype


def prompts_of(root: Path, manifest: Manifest, pool: Pool | None, count: int) -> dict[str, list[list[int]]]:
    """By model, tokens of up to `count` prompts: the first questions of its holdout, with their first choice, cut to
    what leaves room for an answer; without a pool, TEXTS.

    Raises TaskError where a task cannot be built, ProofError where the pool is of other models.
    """
    found = {}
    for name, model in sorted(manifest.models.items()):
        directory = root / model.directory
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        room = context_of(directory) - NEW_TOKENS
        texts = TEXTS if pool is None else tuple(_questions(pool, name))
        tokens = (tokenizer(text)["input_ids"][-room:] for text in texts)
        found[name] = [asked for asked in tokens if len(asked) > 1][:count]
    return found


def _questions(pool: Pool, name: str) -> Iterator[str]:
    entry = next((entry for entry in pool.models if entry.name == name), None)
    if entry is None:
        raise ProofError(f"is in no model of pool {pool.name}", model=name, remedy="give the export's own pool file")
    with tempfile.TemporaryDirectory(prefix="sandhi-tasks-") as aside:
        suite = load_tasks(entry, pool.evaluation, Path(aside))
        for task in suite.tasks:
            for question in task.questions["holdout"]:
                yield "".join(part for part in question.requests[0].args if isinstance(part, str))


def compared(
    root: Path, manifest: Manifest, name: str, completions: Sequence[Completion], pool: Pool | None = None
) -> Compared:
    """Hold a server's completions to the evaluator, in the dtype of the exported files.

    Raises CheckpointError and EvaluationError where the weights cannot be loaded.
    """
    dtype = _compared_dtype(name, manifest.models[name])
    threads = pool.evaluation.threads if pool else None
    settings = EvaluationSettings.model_validate({"dtype": dtype, "device": "cpu", "threads": threads})
    resident, reference = _reference(root, manifest, name, settings, pool)
    asked = [(c, at) for c in completions for at in range(1, len(c.tokens))]
    scored = resident.likelihoods([(c.tokens[:at], c.tokens[at : at + 1]) for c, at in asked])
    answers = list(zip(asked, scored, strict=True))
    largest = max((abs(found - c.logprobs[at - 1]) for (c, at), (found, _) in answers), default=0.0)
    others = [c.tokens[: at + 1] for (c, at), (_, greedy) in answers if at >= c.prompted and not greedy]
    ties = sum(_margin(resident, tokens) <= TIE[dtype] for tokens in others)
    return Compared(
        reference,
        dtype,
        len(completions),
        sum(len(c.chosen) for c in completions),
        len(others),
        ties,
        largest,
        equal=bool(completions) and len(others) == ties and largest <= TOLERANCE[dtype],
    )


def _reference(
    root: Path, manifest: Manifest, name: str, settings: EvaluationSettings, pool: Pool | None
) -> tuple[Resident, str]:
    """The model with the weights that were scored, and where they come from."""
    try:
        directory, weights = searched(root, manifest, name, pool)
        resident = Resident(directory, name, settings)
        resident.hold(weights.tensors, weights.read)
    except SandhiError as error:
        why = f"the exported files; the search's weights are not there: {error.problem.message}"
        return Resident(root / manifest.models[name].directory, name, settings), why
    return resident, "the search's weights"


def searched(root: Path, manifest: Manifest, name: str, pool: Pool | None = None) -> tuple[Path, Weights]:
    """The original of an exported model and the weights that the search and the holdout scored in its place, from the
    artifact root that the export lies in.

    Raises StoreError where that has no such records or they speak of other weights, CheckpointError where the original
    is gone.
    """
    artifacts = artifacts_of(root)
    directory = original_of(root, name, manifest.models[name], pool)
    fingerprint = artifacts.load(Fingerprint, "checkpoint", name)
    trajectory = artifacts.load(Trajectory, "trajectory", f"{manifest.pool}.{name}")
    steps = artifacts.load(OperatingPoints, "operating_points", manifest.pool).deployed.cutoffs[name]
    weights = merged_weights(fingerprint, assignment_at(trajectory, steps), Store(artifacts.root / "store"))
    if weights.key != manifest.models[name].weights:
        raise StoreError(
            "the search has found other weights since",
            model=name,
            remedy="compare with the export that was built last",
        )
    return directory, weights


def _margin(resident: Resident, tokens: Sequence[int]) -> float:
    """How much likelier the best token after all but the last of `tokens` is than the last."""
    with torch.inference_mode():
        logits = resident.model(torch.tensor([tokens[:-1]])).logits[0, -1].float()
    return float(logits.max() - logits[tokens[-1]])
