"""What crosses a stage: frozen records with canonical JSON and a digest. Tensors never do, only their digests.

Two records are equal exactly when their canonical bytes are; the digest of those bytes is the data version that
Dagster shows and that decides what is stale.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

Component = Literal["attn", "mlp", "norms", "embeddings"]
"""What a slot belongs to: the attention or the MLP of a layer, or what lies beside the projections: norms (with the
biases) of a layer or outside of all, embeddings (with the head). Only the first two are profiled and walked."""
Split = Literal["profile", "search", "holdout"]
Scores = dict[str, float]
"""Task name to the value of that task's metric, in the metric's own unit and direction."""
Accepts = Callable[[Scores], bool]
"""Whether a search keeps weights of these scores. No better score is refused where a worse one is accepted."""


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces. NaN and infinities are refused (ValueError)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_of(value: Any) -> str:
    """sha256, hex, of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Part(BaseModel):
    """Base of what lies inside a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Record(Part):
    """Base of all records: canonical bytes, and their digest."""

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.canonical()).hexdigest()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        return cls.model_validate_json(data)


def _unsaid(default: Any) -> Any:
    """A field that canonical bytes leave out while it is empty: a record that does not need it has the digest that it
    had before it was thought of."""
    return Field(default=default, exclude_if=lambda value: not value)


# --- checkpoint ---------------------------------------------------------------------------------------------


class TensorInfo(Part):
    """One tensor of a checkpoint. `digest` is sha256 over dtype, shape and raw bytes (docs/format.md)."""

    name: str
    file: str
    dtype: str  # safetensors' spelling: BF16, F16, F32, ...
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    mean: float
    std: float  # population standard deviation over all elements
    constant_rows: int


class Slot(Part):
    """One projection of one model: where it is and what must agree before it may share a tensor. Or, where a pool asks
    for it, what lies beside the projections: then `projection` is its name below the layer (norm.weight), and `layer`
    is -1 outside of all layers."""

    model: str
    layer: int
    projection: str  # q, k, v, o, gate, up, down, or a fused one: qkv, gate_up
    component: Component
    tensor: str  # name in the checkpoint's files
    digest: str
    nbytes: int
    key: str  # compatibility key: digest over projection, shape, dtype, layout and meaning


class Fingerprint(Record):
    """A checkpoint's identity: every tensor and every file beside them. Holds no path and no time."""

    model: str
    model_type: str
    layers: int
    dtype: str
    files: dict[str, str]  # files that are not weights: relative name to sha256
    tensors: tuple[TensorInfo, ...]  # sorted by name
    slots: tuple[Slot, ...]  # by layer, then q k v o gate up down
    private: tuple[str, ...]  # tensors recognised as weights that are never shared by search (experts, ...)
    rows: str  # sha256 of the side file with the row statistics

    def tensor(self, name: str) -> TensorInfo:
        return next(t for t in self.tensors if t.name == name)

    @property
    def in_order(self) -> tuple[str, ...]:
        """Names of all tensors: the slots' in their order, then the others'."""
        slots = {slot.tensor: None for slot in self.slots}
        return (*slots, *(t.name for t in self.tensors if t.name not in slots))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


# --- evaluation ---------------------------------------------------------------------------------------------


class TaskResult(Record):
    """One task on one split: the aggregate, and one value a question in the split's fixed order."""

    value: float
    higher_is_better: bool
    questions: tuple[float, ...]


class Evaluation(Record):
    """Scores of one set of weights. `weights` names them (see evaluation.scorelog), `context` everything else
    that decides a score: tasks, documents, split, settings, versions."""

    weights: str
    context: str
    split: Split
    tasks: dict[str, TaskResult]

    @property
    def scores(self) -> Scores:
        return {name: result.value for name, result in self.tasks.items()}


class Sensitivity(Record):
    """Scores with noise in one component, averaged over seeds."""

    layer: int
    component: Component
    scores: Scores
    drop: float  # largest drop of any task against the baseline; negative where every task gained


class Profile(Record):
    """Noise sensitivity of every component of one model (SANDHI, noise profiles)."""

    model: str
    fingerprint: str
    seeds: tuple[int, ...]
    questions: dict[str, int]
    baseline: Scores
    sensitivities: tuple[Sensitivity, ...]  # by layer, attn before mlp


# --- groups and plans ---------------------------------------------------------------------------------------


Method = Literal["mean", "regmean", "member", "base"]
"""How a shared tensor comes about: the contributors' mean; the matrix whose outputs are nearest to theirs on their own
inputs; a member's own matrix; that of a checkpoint which they were trained from."""


class Contributor(Part):
    """One original tensor that goes into a shared one, pinned by its bytes. `model` may be a base's name, such as
    `merging.bases[0]`; `inputs` names the moments of inputs that weigh it, where the method weighs."""

    model: str
    layer: int
    tensor: str
    digest: str
    inputs: str = _unsaid("")


class Recipe(Record):
    """Decides a shared tensor byte for byte: contributors in order, method, parameters. `payers`: the models that pay
    for its one copy together, where these are not the contributors (a base is nobody's in the pool)."""

    projection: str
    shape: tuple[int, ...]
    dtype: str
    method: Method
    rescale: Literal["none", "common"]
    contributors: tuple[Contributor, ...]  # sorted by (model, layer); of `member` and `base` the one it is taken from
    payers: tuple[str, ...] = _unsaid(())  # sorted

    @property
    def taken(self) -> str | None:
        """The digest of the tensor where it is somebody's own; None of one that is computed."""
        return self.contributors[0].digest if self.method in ("member", "base") else None

    @property
    def nbytes(self) -> int:
        """Bytes of the shared tensor."""
        count = 1
        for n in self.shape:
            count *= n
        return count * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}


class Adjustment(Record):
    """What one model adds to a shared tensor without touching its bytes. `low_rank`: y = W x + B (A x), the two factors
    named by their digests. `affine`: y = s * (W x) + t + B (A x), or with `rank` 0 without factors. `row_moments`, fp32
    mean and standard deviation of every row, is the reference's: it is read from records and counted, not built here.
    """

    kind: Literal["row_moments", "low_rank", "affine"]
    nbytes: int  # stored beside the shared tensor
    rank: int = 0
    down: str = ""  # A, [rank, columns]
    up: str = ""  # B, [rows, rank]
    scale: str = ""  # s, [rows]
    shift: str = ""  # t, [rows]

    @model_serializer(mode="wrap")
    def _without_vectors(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Kinds that have no vectors do not speak of them, so that their digests are what they were before there were
        any."""
        fields: dict[str, Any] = dumped(self)
        return fields if self.kind == "affine" else {n: v for n, v in fields.items() if n not in ("scale", "shift")}


class Group(Record):
    """Slots proposed to share one tensor. Members need not be contributors (a model that joined later, or was left
    out). `compared`: where the method was chosen by evidence, what each of them would cost (rungs.choice). `left_out`:
    who made it once and does so no more (grouping.reform)."""

    recipe: Recipe
    members: tuple[Slot, ...]  # sorted by (model, layer)
    stage: Literal[1, 2] = 1  # reference grouping: same layer first, across layers second
    compared: dict[Method, float] = _unsaid({})
    left_out: tuple[Contributor, ...] = _unsaid(())


class Exclusion(Record):
    """A slot that is in no group, and why."""

    model: str
    layer: int
    projection: str
    reason: str


class Groups(Record):
    """All groups of one compatibility group of a pool. `groups` is in search order; `candidates`, `gate` and `rule`
    say by which rule they were formed (`rule`: a digest of what decides their methods, empty for the mean)."""

    pool: str
    key: str
    candidates: Literal["wide", "reference"] = "wide"
    gate: float = 0.0  # largest noise drop of a tolerant component
    rule: str = _unsaid("")
    models: tuple[str, ...]
    groups: tuple[Group, ...]
    excluded: tuple[Exclusion, ...]


class PlannedMerge(Record):
    """One slot of the plan's model to be replaced by a recipe's tensor."""

    tensor: str
    projection: str
    nbytes: int
    recipe: Recipe


class PlannedStep(Record):
    """The recipes of one component, applied together."""

    component: Component
    layer: int
    merges: tuple[PlannedMerge, ...]


class Plan(Record):
    """One model's own steps. Holds nothing that changes when another model merely joins."""

    pool: str
    model: str
    fingerprint: str
    steps: tuple[PlannedStep, ...]


# --- search, cutoffs, points --------------------------------------------------------------------------------


class Step(Record):
    """One decided step. `scores` is None where a gallop accepted it inside a longer stride without scoring the
    prefix that ends here (such a step is no cutoff), and where early rejection stopped the scoring. `tensors` maps
    tensor name to the shared tensor's digest, `adjustments` to what the model adds to it.

    A walk's step is about one component of a layer; a ladder's about the whole model, at a `price` that residuals
    must be worth (error taken off for a MiB)."""

    index: int
    component: Component | None = None
    layer: int | None = None
    price: float | None = None
    decision: Literal["accepted", "rejected"]
    scores: Scores | None
    tensors: dict[str, str]
    adjustments: dict[str, Adjustment] = {}
    scaled: bool = False

    @property
    def label(self) -> str:
        """What the step is about, in a few letters."""
        return f"{self.component} {self.layer}" if self.price is None else f"{self.price:.2g}"


class Trajectory(Record):
    """What was tried of one model's plan, and decided: a walk (SANDHI, merge-incrementally-check-rollback), or the
    rungs of a ladder that were scored, from safe to bold (rungs.ladder)."""

    pool: str
    model: str
    plan: str
    baseline: Scores
    higher_is_better: dict[str, bool]
    tolerance: dict[str, float]
    questions: dict[str, int]
    evaluations: int  # evaluations that were asked for, whether or not they were found in the score log
    noise_floor: Scores = {}  # how far the baseline moves when the same weights are scored in other batches
    steps: tuple[Step, ...]


class Cutoff(Record):
    """Going `steps` steps along the trajectory: all accepted steps with index < steps are applied."""

    steps: int
    accepted: int
    scores: Scores
    drops: Scores  # against the original's baseline; positive is worse, whatever the metric's direction
    # Bytes of its slots that hold a shared tensor which has a file, less adjustments: an upper bound of its own saving.
    freed: int
    within_budget: bool


class CutoffSet(Record):
    """Every scored cutoff of one model, from 0 (the original) to the deepest scored one."""

    pool: str
    model: str
    budgets: dict[str, float]
    cutoffs: tuple[Cutoff, ...]
    deepest: int  # largest `steps` within budget
    knee: int


class HoldoutTask(Record):
    """Paired comparison on questions never used before. `difference` is the change of the metric, merged minus
    original, turned so that negative is worse; `low` and `high` bound it at 95 %; `bound` is its one-sided 95 %
    lower bound. `certifiable` is the smallest budget that so many questions, answered with this much variance, could
    certify of weights that lose nothing."""

    metric: str
    budget: float
    original: float
    merged: float
    difference: float
    low: float
    high: float
    bound: float
    questions: int
    within_budget: bool
    certified: bool
    certifiable: float


Quality = Literal["point", "certified"]
"""What a model must show on the holdout: the measured change within budget, or its one-sided 95 % bound."""


class Look(Record):
    """One cutoff on the holdout and what was measured there. A task is `certified` where its bound kept the budget
    at this look and at every look before it, whatever came after."""

    steps: int
    within_budget: bool
    weights: str  # the name under which exactly these weights were scored
    tasks: dict[str, HoldoutTask]

    def holds(self, quality: Quality) -> bool:
        """Whether these weights may be deployed."""
        return self.within_budget and (quality == "point" or all(task.certified for task in self.tasks.values()))


class HoldoutScore(Record):
    """A cutoff that holds on the holdout, by fixed-sequence testing from safe to bold: as walked the boldest, after
    `going` a shallower one. `weights` and `tasks` are those of that cutoff."""

    pool: str
    model: str
    quality: Quality = "point"
    steps: int
    weights: str
    tasks: dict[str, HoldoutTask]
    original: Look  # cutoff 0: compared with itself, it costs no look
    walked: tuple[Look, ...]

    @property
    def held(self) -> dict[int, Look]:
        """Every cutoff that may be deployed, by its steps: the original, and what was looked at and held."""
        return {look.steps: look for look in (self.original, *self.walked) if look.holds(self.quality)}

    def going(self, steps: int) -> "HoldoutScore":
        """The score of another cutoff of the same walk. Raises KeyError unless it is in `held`."""
        look = self.held[steps]
        return self.model_copy(update={"steps": steps, "weights": look.weights, "tasks": look.tasks})


class Savings(Record):
    """Bytes. `checkpoint_bytes` is what all members hold on disk (tensor data); `freed` counts distinct tensors
    kept once, duplicates included, net of what their alignment takes; `overhead` are corrections and adjustments."""

    checkpoint_bytes: int
    resident_bytes: int  # the same without tensors that a server does not keep (tied copies)
    duplicates: int
    freed: int
    overhead: int

    @property
    def net(self) -> int:
        return self.freed - self.overhead


class OperatingPoint(Record):
    """A cutoff for every model."""

    name: str
    criterion: str
    cutoffs: dict[str, int]
    drops: dict[str, float]  # per model the largest drop of its tasks on the search split
    savings: Savings


class OperatingPoints(Record):
    pool: str
    points: tuple[OperatingPoint, ...]
    frontier: tuple[str, ...]  # names of points on the Pareto frontier of savings against worst drop
    deployed: OperatingPoint  # cutoffs that held on the holdout, none bolder than it is worth
    holdouts: dict[str, str] = {}  # by model the digest of what held when its deployed cutoff was chosen
    alignment: int  # of shared files, in bytes, by which savings were counted


# --- export, proof, deployment ------------------------------------------------------------------------------


Linked = Literal["hardlink", "reflink", "copy"]
"""How shared shards reached an export from the store."""


class ExportedTensor(Part):
    digest: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str  # relative to the model's directory
    sharing: Literal["private", "duplicate", "merged"]


class ExportedModel(Record):
    directory: str  # relative to the export root
    weights: str  # the name under which the holdout scored these weights
    files: dict[str, str]  # files copied byte for byte: name to sha256
    tensors: dict[str, ExportedTensor]
    linked: Linked


class Adapter(Part):
    """A model as a PEFT LoRA adapter: its directory in the export, the largest rank in it, and its bytes. A model that
    adds nothing has no directory: it is the base itself."""

    directory: str | None
    rank: int
    nbytes: int


class Base(Part):
    """A stock checkpoint of what its adapters' models hold in common; `adapters` is by model name."""

    directory: str
    adapters: dict[str, Adapter]

    @property
    def rank(self) -> int:
        return max(adapter.rank for adapter in self.adapters.values())


class Ordinary(Part):
    """Why a model is no adapter: the first tensor or file that makes it none, how many there are, and what those that
    are tensors take in bytes."""

    reason: str
    first: str | None = None
    count: int = 0
    nbytes: int = 0


class StockPlan(Part):
    """An export as stock servers take it: bases, each with the models that are adapters of it, and all other models."""

    max_rank: int
    bases: tuple[Base, ...]
    ordinary: dict[str, Ordinary]

    @property
    def base_of(self) -> dict[str, Base]:
        """By name of every model that is an adapter; their number is how often the plan is complete."""
        return {model: base for base in self.bases for model in base.adapters}


class Manifest(Record):
    """`sandhi.json` at the root of an export: what every file must hold. Normative: docs/format.md."""

    schema_version: Literal[1] = 1
    pool: str
    point: str
    models: dict[str, ExportedModel]
    # Only where the pool asks for it: other manifests do not speak of it.
    stock: StockPlan | None = Field(default=None, exclude_if=lambda plan: plan is None)
    # Of the tensor in a shared file, in bytes; likewise.
    alignment: Literal[4096, 2097152] = Field(default=4096, exclude_if=lambda alignment: alignment == 4096)


class MergedWeights(Record):
    """The export of one pool. `export` is relative to the artifact root."""

    pool: str
    export: str
    manifest: str  # sha256 of sandhi.json
    models: tuple[str, ...]


class ProcessMemory(Record):
    """One serving process, from /proc/PID/smaps, in bytes, over the mappings of the model's weight files."""

    model: str
    rss: int
    pss: int
    shared: int  # of rss, pages that some other mapping has too
    private: int  # the rest of it
    private_dirty: int  # of `private`, what was written to and is not on the disk
    unmapped: int  # parameter bytes that are not backed by the files
    whole: int  # proportional set size of all that the process has


class MemoryComparison(Record):
    """The same models served from their originals, and from the export; bytes. `shared`: spared by the processes of the
    export, from their own mappings alone; `saved`: by how much they take less than those of the originals."""

    engine: str
    originals: tuple[ProcessMemory, ...]
    exports: tuple[ProcessMemory, ...]
    shared: int
    saved: int


class SharingProof(Record):
    """Claimed, verified on disk, verified in memory; never one for another."""

    pool: str
    export: str
    manifest: str
    passed: bool
    problems: tuple[str, ...]
    tensors_checked: int
    questions_checked: dict[str, int]  # per model, answered by stock transformers from the exported files
    questions_equal: dict[str, int]
    checkpoint_bytes: int
    duplicates: int
    claimed: int
    verified_disk: int
    verified_memory: int
    memory: MemoryComparison
