"""The pool file: which models are served together, on which tasks they are judged, within which budgets."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sandhi_core.pools.cron import times
from sandhi_core.pools.file import read_document
from sandhi_core.pools.mistakes import faults, unsure
from sandhi_core.pools.problems import Fault, FieldError, Loc, Mistake, pool_error, shown
from sandhi_core.pools.rules import broken_rules
from sandhi_core.records import Method

SPLITS_TOLERANCE = 1e-9
HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?")
UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}


def _positive_size(text: str) -> str:
    if size_in_bytes(text) < 1:
        raise FieldError("must be more than nothing", "write a size such as 80GiB")
    return text


def size_in_bytes(text: str) -> int:
    """Bytes of a size such as `80GiB` or `1.5 GB`."""
    number, unit = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]+)", text, re.ASCII).groups()  # type: ignore[union-attr]
    return int(float(number) * UNITS[unit])


def _cron(text: str) -> str:
    try:
        times(text)
    except ValueError as error:
        raise FieldError(
            str(error), 'write five fields of cron, such as "0 3 * * *": every night at three, UTC'
        ) from None
    return text


def _owner(text: str) -> str:
    if not re.fullmatch(r"team:[A-Za-z0-9][A-Za-z0-9_-]*|[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+", text):
        raise FieldError(f"{shown(text)} is neither a team nor an address", "write team:NAME or name@example.org")
    return text


def _local_path(text: str, info: ValidationInfo) -> str:
    """Absolute; relative to the pool file where one is being read (its folder is in the context)."""
    if info.context is None:
        return text
    try:
        return str((info.context["folder"] / Path(text).expanduser()).resolve())
    except (OSError, RuntimeError) as error:  # no such user, a loop of links
        raise FieldError(f"is no usable path: {error}", "correct the path") from None


def _model_path(text: str, info: ValidationInfo) -> str:
    """A directory as an absolute path; a hub id as it stands."""
    local = _local_path(text, info)
    is_hub_id = HUB_ID.fullmatch(text) and not (info.context is not None and Path(local).is_dir())
    return text if is_hub_id else local


Slug = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4096)]
LocalPath = Annotated[Text, AfterValidator(_local_path)]
ModelPath = Annotated[Text, AfterValidator(_model_path)]
Size = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?\s*(MiB|GiB|MB|GB)$"),
    AfterValidator(_positive_size),
]
Owner = Annotated[Text, AfterValidator(_owner)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy's generators take
Engine = Literal["vllm", "transformers"]


class Section(BaseModel):
    """Base of all parts: nothing unknown, nothing converted from another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class TaskBudget(Section):
    """A task the model must stay good at."""

    task: Text
    metric: Text
    budget: Positive
    """Largest drop allowed, absolute, in the metric's own unit (0.02 of an accuracy is two points)."""


class ModelEntry(Section):
    """One model of the pool."""

    name: Slug
    path: ModelPath
    """A checkpoint directory (relative to the pool file) or a hub id."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id."""
    tasks: Annotated[tuple[TaskBudget, ...], Field(min_length=1, strict=False)]
    engine: Engine | None = None
    """What serves this model, where that is another than `deploy: engine`. Goes with no `deploy: adapters`."""

    @field_validator("tasks")
    @classmethod
    def _each_task_once(cls, tasks: tuple[TaskBudget, ...]) -> tuple[TaskBudget, ...]:
        names = [entry.task for entry in tasks]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise FieldError(f"task {shown(repeated[0])} is listed twice", "remove one of the two")
        return tasks

    @model_validator(mode="after")
    def _revision_of_hub_id(self) -> Self:
        if self.revision is not None and self.path.startswith("/"):
            raise FieldError("revision belongs to a hub id; this path is a directory", "remove the revision")
        return self


class Splits(Section):
    """Fractions of every task's questions; they add up to 1."""

    profile: Fraction = 0.3
    search: Fraction = 0.3
    holdout: Fraction = 0.4

    @model_validator(mode="after")
    def _sum_to_one(self) -> Self:
        total = self.profile + self.search + self.holdout
        if abs(total - 1.0) > SPLITS_TOLERANCE:
            remedy = "choose three that do, such as 0.3, 0.3 and 0.4; one that is left out has its default"
            raise FieldError(f"profile, search and holdout must add up to 1, not {total:g}", remedy)
        return self


class EvaluationSettings(Section):
    include_path: LocalPath | None = None
    """Folder with further lm-eval task files (relative to the pool file)."""
    batch_tokens: Annotated[int, Field(ge=1)] = 8192
    cache_memory: Size | None = None
    """What the hidden states kept between evaluations may take; by default a quarter of the memory that is free. It
    decides how fast scores are found, not what they are."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What models are scored in; auto: float32 on a CPU, else the file's."""
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    splits: Splits = Splits()
    seed: Seed = 42
    """Decides which question falls into which split, and few-shot examples."""


class ProfileSettings(Section):
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, strict=False)] = (1234,)
    """Noise seeds; scores are averaged over them."""
    gate: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.05
    """Drop under noise up to which a component counts as tolerant."""
    noise: bool = True
    """Whether components are scored with noise. A ladder does not need it; then a profile is one evaluation."""

    @field_validator("seeds")
    @classmethod
    def _each_seed_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise FieldError("a seed is listed twice", "remove one of the two")
        return seeds


class GroupingSettings(Section):
    candidates: Literal["wide", "reference"] = "wide"
    besides: Annotated[tuple[Literal["norms", "embeddings"], ...], Field(strict=False)] = ()
    """What may be shared beside projections: `norms` (their weights, and biases), `embeddings` (and heads, of models
    whose tokens have the same numbers). Needs `search: strategy: ladder`."""
    on_new_model: Literal["join", "regroup"] = "join"
    on_removed_model: Literal["reform", "keep"] = "reform"
    on_regroup: Literal["fresh", "accepted"] = "fresh"
    """Who makes the averages of groups that are formed anew: all members; or, of a group whose tensor is deployed, only
    those of them that are served it (two at least). All are searched again."""

    @field_validator("besides")
    @classmethod
    def _each_kind_once(cls, besides: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(besides)) < len(besides):
            raise FieldError("one of these is listed twice", "remove one of the two")
        return besides


class SearchSettings(Section):
    strategy: Literal["walk", "ladder"] = "walk"
    """`walk`: one component after the other, merged, checked and kept or not (SANDHI). `ladder`: whole assignments from
    safe to bold, the boldest that holds found by bisection: about two dozen evaluations a model."""
    errors: Literal["answers", "outputs"] = "answers"
    """What a ladder, and a pool that compares `merging.methods`, takes for the error of a shared matrix: `outputs`, the
    part that it changes of a projection's outputs; `answers`, that times how much the model's answers depend on these
    (by gradients: a forward and a backward pass over the profile split)."""
    accept: Literal["original", "reference"] = "original"
    stride: Literal["gallop", 1] = "gallop"
    tolerance: Positive | None = None
    """Drop up to which a step is accepted; by default the model's largest budget."""
    early_rejection: bool = False
    """Stop scoring as soon as a candidate cannot be accepted any more, whatever is still unanswered. The decisions are
    the same; steps that are rejected so have no scores in the record."""

    @field_validator("stride", mode="before")
    @classmethod
    def _true_is_no_number(cls, stride: object) -> object:
        if isinstance(stride, bool):
            raise FieldError("must be gallop or 1", "choose one of these")
        return stride


class HoldoutSettings(Section):
    quality: Literal["point", "certified"] = "point"
    """What a model must show on questions never used before: `point`, a measured drop within budget; `certified`, the
    one-sided 95 % bound of the drop within budget."""


class MergingSettings(Section):
    methods: Annotated[tuple[Method, ...], Field(min_length=1, strict=False)] = ("mean",)
    """What tensor a group may share: the `mean` of its members' matrices; `regmean`, the matrix whose outputs are
    nearest to theirs on their own prompts; a `member`'s own matrix; that of a `base` named below. Of several, each
    group takes the one that costs its members least, of equals the first."""
    bases: Annotated[tuple[ModelPath, ...], Field(strict=False)] = ()
    """Checkpoints that models were trained from: directories (relative to the pool file) or hub ids. Each group is
    offered the nearest that fits it. They are served only where they are models of the pool too: such a model holds
    what is taken from it as its own."""
    reform: bool = False
    """Leave models out of an average that is better without them; they may still hold it. Needs `search: strategy:
    ladder`."""
    rescale: Literal["none", "common"] = "none"
    residuals: Literal["none", "low_rank"] = "none"
    """`low_rank`: a model may add a correction of its own to a shared matrix, y = W x + B (A x). Needs `search:
    strategy: ladder`, and something that applies it: vLLM with the plugin, `deploy: engine: transformers`, or
    `deploy: adapters`."""
    affine: Literal["none", "rows"] = "none"
    """`rows`: a model may scale and shift the outputs of a shared matrix, y = s * (W x) + t with a number of each for
    every row, instead of a residual or beside it. Needs `search: strategy: ladder`, and vLLM with the plugin or
    `deploy: engine: transformers`."""

    @field_validator("methods", "bases")
    @classmethod
    def _each_once(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := [one for at, one in enumerate(given) if one in given[:at]]:
            raise FieldError(f"{shown(repeated[0])} is listed twice", "remove one of the two")
        return given

    @property
    def plain(self) -> bool:
        """Whether every group shares the mean of all its members."""
        return self.methods == ("mean",) and not self.reform

    @property
    def compares(self) -> bool:
        """Whether groups choose by evidence."""
        return len(self.methods) > 1 or self.reform

    @property
    def weighs(self) -> bool:
        """Whether groups are formed with the moments of the models' inputs."""
        return self.compares or "regmean" in self.methods


LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""What vLLM takes for --max-lora-rank (MaxLoRARanks in its vllm/config/lora.py)."""


class Adapters(Section):
    """Models as PEFT LoRA adapters of one base, which one stock vLLM serves."""

    max_rank: LoraRank = 64
    """The largest rank of a residual: vLLM's --max-lora-rank, which takes no other numbers."""

    @field_validator("max_rank", mode="before")
    @classmethod
    def _true_is_no_rank(cls, rank: object) -> object:
        if isinstance(rank, bool):
            raise FieldError("must be a rank that vLLM takes", "choose one of 1, 8, 16, 32, 64, 128, 256, 320, 512")
        return rank


@dataclass(frozen=True)
class Base:
    """One of a pool's bases, by the name that records and errors give it."""

    name: str
    path: str
    revision: None = None


ALIGNMENTS = {"4KiB": 4096, "2MiB": 2 << 20}


class DeploySettings(Section):
    engine: Engine = "vllm"
    plugin: bool = True
    """Whether vLLM has Sandhi's plugin: it maps shared tensors, so that servers hold each once, and applies what models
    add to them. Without it vLLM serves plain checkpoints and adapters, each server with a copy of all its weights."""
    adapters: Adapters | None = None
    """Where it is set, models whose tensors are all in common but for residuals are exported as PEFT LoRA adapters of
    one base too, and one stock vLLM serves them. Every rung of a ladder then shares all that can be shared, with
    residuals of no larger rank. Needs `merging: residuals: low_rank`."""
    alignment: Literal["4KiB", "2MiB"] = "4KiB"
    """To a multiple of which the tensor in a shared file begins: a page, or what a GPU maps at once, for tools that map
    such files there; nothing in Sandhi needs it. With 2MiB every shared file is as much larger, which is no saving, and
    a tensor that would save less than that is not shared."""
    device_memory: Size = "80GiB"

    @property
    def alignment_bytes(self) -> int:
        return ALIGNMENTS[self.alignment]

    @property
    def device_bytes(self) -> int:
        return size_in_bytes(self.device_memory)


class Pool(Section):
    """A pool of models to be served together."""

    name: Slug
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1, strict=False)]
    owners: Annotated[tuple[Owner, ...], Field(strict=False)] = ()
    """Whom to ask about the pool, as the Dagster UI shows it: `team:NAME` or addresses. They decide nothing."""
    evaluation: EvaluationSettings = EvaluationSettings()
    profile: ProfileSettings = ProfileSettings()
    grouping: GroupingSettings = GroupingSettings()
    search: SearchSettings = SearchSettings()
    merging: MergingSettings = MergingSettings()
    holdout: HoldoutSettings = HoldoutSettings()
    deploy: DeploySettings = DeploySettings()
    rebuild: Annotated[Text, AfterValidator(_cron)] | None = None
    """When Dagster's schedule forms the groups anew and rebuilds what follows, as cron has it, in UTC: `0 3 * * *` is
    every night at three. Without it that is done by `sandhi build --regroup` alone."""

    @property
    def bases(self) -> tuple[Base, ...]:
        return tuple(Base(f"merging.bases[{at}]", path) for at, path in enumerate(self.merging.bases))

    @property
    def engines(self) -> dict[str, Engine]:
        """By model, what serves it."""
        return {entry.name: entry.engine or self.deploy.engine for entry in self.models}

    def on(self, device: str) -> "Pool":
        """The same with its models scored on `device`."""
        return self.model_copy(update={"evaluation": self.evaluation.model_copy(update={"device": device})})

    def tolerance(self, model: ModelEntry) -> dict[str, float]:
        """Per task the drop up to which the search accepts a step: budgets scaled so that the model's largest
        becomes `search.tolerance` (which is that largest budget unless set)."""
        largest = max(entry.budget for entry in model.tasks)
        tolerance = largest if self.search.tolerance is None else self.search.tolerance
        # In this order the task with the largest budget gets the tolerance itself, to the last bit.
        return {entry.task: tolerance * (entry.budget / largest) for entry in model.tasks}


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a pool file; rules between fields are left to `load_pool`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Pool.model_json_schema()}


def load_pool(path: Path) -> Pool:
    """Read a pool file. Paths in it come back absolute (relative ones are relative to the file).

    Raises PoolMistakesError with every mistake found, each with `path:line` as its file; PoolError where there is no
    such file.
    """
    document = read_document(path)
    pool, invalid, unclear = None, list[Fault](), set[Loc]()
    try:
        pool = Pool.model_validate(document.data, context={"folder": path.absolute().parent})
    except ValidationError as error:
        invalid, unclear = list(faults(error, Pool)), unsure(error, Pool)
    found = [*broken_rules(document.data, document.line, unclear), *invalid]
    mistakes = [*document.repeated, *(Mistake(document.line(f.loc), f.message, f.remedy) for f in found)]
    if pool is None or mistakes:
        raise pool_error(path, mistakes)
    return pool
