"""Which stage of what depends on which: one pure function, and the planner that decides what is stale.

Dagster's partition mappings, the sensor, the schedules and the command line are all made from `Catalogue.graph`,
so they cannot disagree. Nothing here reads a weight or knows a workflow engine.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from sandhi_core.errors import PoolError
from sandhi_core.pools.pool import Base, ModelEntry, Pool
from sandhi_core.records import digest_of
from sandhi_core.rungs.allotment import LADDER_VERSION

Node = tuple[str, str]
"""(stage, key). Keys: `model`, `pool.group`, `pool.model` or `pool`, by the stage's scope."""

Scope = Literal["model", "group", "member", "pool"]


@dataclass(frozen=True)
class Stage:
    """`version` changes whenever the same inputs would give another record: everything downstream re-runs."""

    scope: Scope
    version: int
    per_model: tuple[
        str, ...
    ] = ()  # upstream stages read for the node's own model, or every member of its pool or group
    per_pool: tuple[str, ...] = ()  # upstream stages read once: the node's group or pool


# In the order in which they run.
STAGES: dict[str, Stage] = {
    "checkpoint": Stage("model", 1),
    "profile": Stage("model", 1, ("checkpoint",)),
    "groups": Stage("group", 3, ("checkpoint", "profile")),
    "plan": Stage("member", 2, ("checkpoint", "profile"), ("groups",)),
    # The contributors' checkpoints are no upstream of a trajectory: the plan pins their bytes by digest, so that a
    # model that merely joins leaves the others' nodes as they were.
    "trajectory": Stage("member", 3, ("checkpoint", "plan")),
    "cutoffs": Stage("member", 2, ("plan", "trajectory")),
    "holdout": Stage("member", 3, ("checkpoint", "trajectory", "cutoffs")),
    "operating_points": Stage("pool", 3, ("checkpoint", "trajectory", "cutoffs", "holdout")),
    "merged_weights": Stage("pool", 3, ("checkpoint", "plan", "trajectory", "holdout"), ("operating_points",)),
    "sharing_proof": Stage("pool", 2, ("checkpoint", "trajectory", "holdout"), ("operating_points", "merged_weights")),
    "deployment": Stage("pool", 3, ("checkpoint", "holdout"), ("operating_points", "merged_weights", "sharing_proof")),
}


UNREADABLE = "unreadable"
"""The group key of models whose configuration cannot be read: to which group they belong is not known just now."""


class Definition(NamedTuple):
    """What decides a model's profile, as the pool that is named says it."""

    pool: str
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Catalogue:
    """Pools as loaded, and for each model the coarse compatibility group that its configuration puts it in."""

    pools: dict[str, Pool]
    group_of: dict[str, str]  # model to group key

    def __post_init__(self) -> None:
        definitions: dict[str, Definition] = {}
        for pool in self.pools.values():
            definitions = agreed(pool, definitions)

    def entry(self, key: str) -> tuple[Pool, ModelEntry]:
        """The entry of a `model` or `pool.model` key (for a bare model, of the first pool that has it)."""
        pool_name, _, model = key.rpartition(".")
        pools = [self.pools[pool_name]] if pool_name else list(self.pools.values())
        return next((p, e) for p in pools for e in p.models if e.name == model)

    def members(self, key: str) -> tuple[str, ...]:
        """Models of a `pool.group` or `pool` key, sorted."""
        pool_name, _, group = key.partition(".")
        names = sorted(e.name for e in self.pools[pool_name].models)
        return tuple(n for n in names if not group or self.group_of[n] == group)

    def unreadable(self, pool: str) -> tuple[str, ...]:
        """Models of a pool that cannot be read just now, and so are missing in their group."""
        return self.members(f"{pool}.{UNREADABLE}")

    def pools_of(self, node: Node) -> tuple[Pool, ...]:
        """The pools that a node is made for: of a model's all that name it."""
        stage, key = node
        if STAGES[stage].scope == "model":
            return tuple(p for p in self.pools.values() if any(e.name == key for e in p.models))
        return (self.pools[key.partition(".")[0]],)

    def on(self, device: str) -> "Catalogue":
        """The same with every model scored on `device`."""
        return replace(self, pools={name: pool.on(device) for name, pool in self.pools.items()})

    def keys(self, scope: Scope) -> tuple[str, ...]:
        pairs = [(p.name, e.name) for p in self.pools.values() for e in p.models]
        found = {
            "model": {m for _, m in pairs},
            "group": {f"{p}.{self.group_of[m]}" for p, m in pairs},
            "member": {f"{p}.{m}" for p, m in pairs},
            "pool": set(self.pools),
        }[scope]
        return tuple(sorted(found))

    def graph(self) -> dict[Node, tuple[Node, ...]]:
        """Every node with its direct upstreams, in an order in which they can run."""
        return {
            (name, key): tuple(self._upstream(stage, key))
            for name, stage in STAGES.items()
            for key in self.keys(stage.scope)
        }

    def regrouped(self, wanted: bool = True) -> frozenset[Node]:
        """The nodes to force where all groups are to be formed anew; none where that is not wanted."""
        return frozenset(("groups", key) for key in self.keys("group")) if wanted else frozenset()

    def _upstream(self, stage: Stage, key: str) -> Iterable[Node]:
        pool_name, _, rest = key.partition(".")
        models = (key.rpartition(".")[2],) if stage.scope in ("model", "member") else self.members(key)
        for name in stage.per_model:
            for model in models:
                yield name, model if STAGES[name].scope == "model" else f"{pool_name}.{model}"
        for name in stage.per_pool:
            yield name, f"{pool_name}.{self.group_of[rest]}" if STAGES[name].scope == "group" else pool_name


def agreed(pool: Pool, definitions: Mapping[str, Definition]) -> dict[str, Definition]:
    """The definitions of models by name, and those of one more pool. Raises PoolError where two differ."""
    own = {entry.name: Definition(pool.name, profile_inputs(pool, entry)) for entry in pool.models}
    for name, definition in own.items():
        first = definitions.get(name, definition)
        if first.inputs != definition.inputs:
            raise PoolError(
                f"model {name!r} is defined differently in pools {first.pool!r} and {pool.name!r}",
                model=name,
                remedy="give path, revision, tasks, evaluation and profile alike in both, or rename one",
            )
    return {**own, **definitions}


def profile_inputs(pool: Pool, entry: ModelEntry) -> dict[str, Any]:
    """What of a pool file decides a model's profile (budgets do not)."""
    return {
        "path": entry.path,
        "revision": entry.revision,
        "tasks": [[t.task, t.metric] for t in entry.tasks],
        "evaluation": pool.evaluation.model_dump(mode="json", exclude={"threads"}),
        "seeds": list(pool.profile.seeds),
        "noise": pool.profile.noise,
    }


def own_inputs(
    catalogue: Catalogue,
    node: Node,
    identity: Callable[[Pool, ModelEntry | Base], Any],
    scoring: Callable[[Pool, ModelEntry], Any],
) -> Any:
    """What a node depends on besides its upstreams, as plain JSON.

    `identity` names the files of a model's or a base's checkpoint cheaply (sizes and times); `scoring` all that decides
    a model's scores besides its weights (tasks by content, metrics, conditions).
    """
    stage, key = node
    scope = STAGES[stage].scope
    if scope == "group":
        pool, members = catalogue.pools[key.partition(".")[0]], catalogue.members(key)
        weighing = {m.name: scoring(pool, m) for m in pool.models if m.name in members} if pool.merging.weighs else {}
        return {
            "models": members,
            "grouping": _grouping(pool),
            "merging": pool.merging.model_dump(mode="json"),
            "gate": pool.profile.gate,
            # What decides the moments of inputs, and the files of bases, are in no record that groups are made from.
            **({"weighing": [*evidence_rule(pool), weighing]} if weighing else {}),
            **({"bases": [identity(pool, base) for base in pool.bases]} if pool.bases else {}),
        }
    if scope == "pool":
        return _pool_inputs(catalogue.pools[key], stage, scoring)
    pool, entry = catalogue.entry(key)
    budgets = {t.task: t.budget for t in entry.tasks}
    match stage:
        case "checkpoint":
            return {"path": entry.path, "revision": entry.revision, "files": identity(pool, entry)}
        case "profile":
            return {"scoring": scoring(pool, entry), "seeds": pool.profile.seeds, "noise": pool.profile.noise}
        case "plan":
            return {"grouping": _grouping(pool), "gate": pool.profile.gate}
        case "trajectory":
            search = {**pool.search.model_dump(mode="json"), "tolerance": pool.tolerance(entry)}
            ladder = _ladder(pool) if pool.search.strategy == "ladder" else None
            return {"scoring": scoring(pool, entry), "search": search, "ladder": ladder}
        case "cutoffs":
            return {"budgets": budgets}
        case _:
            return {"scoring": scoring(pool, entry), "budgets": budgets, "quality": pool.holdout.quality}


def evidence_rule(pool: Pool) -> list[Any]:
    """What decides, besides models and questions, how slots bid where groups choose by evidence: of a ladder's what is
    no vector of rows, which evidence does not look at. It names the rule of such groups too (grouping.methods)."""
    adapters = pool.deploy.adapters
    return [LADDER_VERSION, pool.merging.residuals, pool.search.errors, None if adapters is None else adapters.max_rank]


def _grouping(pool: Pool) -> dict[str, Any]:
    """A pool that shares projections alone has the inputs that it had before anything else could be shared. Who makes
    averages at a regrouping changes nothing before there is one."""
    left_out = {"on_regroup"} if pool.grouping.besides else {"on_regroup", "besides"}
    return pool.grouping.model_dump(mode="json", exclude=left_out)


def _pool_inputs(pool: Pool, stage: str, scoring: Callable[[Pool, ModelEntry], Any]) -> Any:
    match stage:
        case "operating_points":
            budgets = {m.name: {t.task: t.budget for t in m.tasks} for m in pool.models}
            return {"budgets": budgets, **aligned} if (aligned := _alignment(pool)) else budgets
        case "sharing_proof":
            own = _own_engines(pool)
            return {
                m.name: [scoring(pool, m), [t.budget for t in m.tasks], *([own[m.name]] if m.name in own else [])]
                for m in pool.models
            }
        case "deployment":
            deploy = pool.deploy.model_dump(mode="json", exclude_none=True, exclude={"alignment"})
            engines = {"engines": own} if (own := _own_engines(pool)) else {}
            return {"deploy": deploy, "dtype": pool.evaluation.dtype, **engines}
        case _:
            adapters = pool.deploy.adapters
            asked = {} if adapters is None else {"adapters": adapters.max_rank}
            return {"models": sorted(m.name for m in pool.models), **asked, **_alignment(pool)}


def _own_engines(pool: Pool) -> dict[str, str]:
    """By model, its engine, where that is not the pool's: pools of one engine keep what they have."""
    return {model: engine for model, engine in pool.engines.items() if engine != pool.deploy.engine}


def _alignment(pool: Pool) -> dict[str, Any]:
    """Named only where it is another: pools without it keep what they have."""
    return {} if pool.deploy.alignment == "4KiB" else {"alignment": pool.deploy.alignment}


def _ladder(pool: Pool) -> list[Any]:
    """What decides the rungs of a ladder besides the plan. Options are named only where they are on: pools without
    them keep what they have."""
    adapters = pool.deploy.adapters
    affine = ["affine"] if pool.merging.affine == "rows" else []
    return [LADDER_VERSION, pool.merging.residuals, *affine, *([] if adapters is None else [adapters.max_rank])]


@dataclass(frozen=True)
class Stored:
    """What the artifact root says of a node that ran: the inputs it ran on and what it gave."""

    fingerprint: str
    data_version: str


@dataclass(frozen=True)
class Schedule:
    """`frontier` can run now; `waiting` lies downstream of it and may turn out to be fresh after all."""

    fresh: tuple[Node, ...]
    frontier: dict[Node, str]  # node to the fingerprint it will have
    waiting: tuple[Node, ...]


def fingerprint(node: Node, own: Any, upstream: Mapping[Node, str]) -> str:
    """Digest over stage, stage version, own inputs and the data versions of the upstreams."""
    versions = sorted([stage, key, version] for (stage, key), version in upstream.items())
    return digest_of([node[0], STAGES[node[0]].version, own, versions])


def schedule(
    graph: Mapping[Node, tuple[Node, ...]],
    own: Callable[[Node], Any],
    stored: Callable[[Node], Stored | None],
    forced: frozenset[Node] = frozenset(),
) -> Schedule:
    """What is stale. A node whose upstreams are all fresh is stale iff its fingerprint differs from the stored
    one (or it is `forced`); below a stale node nothing is known yet, because equal results stop the wave."""
    fresh: dict[Node, str] = {}
    frontier: dict[Node, str] = {}
    waiting: list[Node] = []
    for node, upstream in graph.items():
        if any(u not in fresh for u in upstream):
            waiting.append(node)
            continue
        wanted = fingerprint(node, own(node), {u: fresh[u] for u in upstream})
        found = stored(node)
        if found is not None and found.fingerprint == wanted and node not in forced:
            fresh[node] = found.data_version
        else:
            frontier[node] = wanted
    return Schedule(tuple(fresh), frontier, tuple(waiting))
