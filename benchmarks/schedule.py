"""A simulation: how long a pool of a hundred models would take on 1, 8 and 64 devices.

    python -m benchmarks.schedule [--steps benchmarks/steps-*.json] [--models 100] [--out benchmarks/schedule]
    python -m benchmarks.schedule --measure .sandhi --told "the demo pool" --steps benchmarks/steps-demo.json

Nothing here ran on that many devices. Real are the graph (Catalogue.graph of a pool file with that many models), what
may run when (the planner's own `schedule`), and how long each step took in a build of few models (benchmarks/steps.py,
kept beside this file). Assumed are:

- a model takes as long as one of those that were measured, in turn; a step that is one for a group or a pool takes
  longer in proportion to its models;
- a run needs LAUNCH seconds besides its step, to start a process that imports everything;
- a run that scores takes a device, any other one of OTHERS places beside; a device is as fast as what was measured on;
- storage and the instance's database are never what is waited for.

Two ways of starting runs are compared. Waves, as the sensor does it: what may run is started when nothing runs any
more, and is noticed TICK / 2 seconds later on average. At once (Graham 1966, list scheduling): every run starts as soon
as its upstreams have ended and there is a place, in the order of the graph. Both are deterministic.
"""

import argparse
import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assets.stages import STAGE_ASSETS
from benchmarks.rows import table
from benchmarks.steps import Steps, measured
from sandhi_core.graph import STAGES, Catalogue, Node, Stored, fingerprint, schedule
from sandhi_core.pool import Pool

DEVICES = (1, 2, 4, 8, 16, 32, 64, 128)
LAUNCH = 10.0
TICK = 30.0
OTHERS = 16
SCORES = frozenset(stage.name for stage in STAGE_ASSETS if stage.scores)

Graph = Mapping[Node, tuple[Node, ...]]
Seconds = Mapping[Node, float]


def catalogue(models: int, pools: int) -> Catalogue:
    """`pools` pools of compatible models, `models` in all. No file of them exists or is looked for."""
    names = [f"model-{i:03}" for i in range(models)]
    tasks = [{"task": "questions", "metric": "acc", "budget": 0.02}]
    made = {
        f"pool-{p:02}": Pool.model_validate(
            {
                "name": f"pool-{p:02}",
                "models": [{"name": n, "path": f"/models/{n}", "tasks": tasks} for n in names[p::pools]],
            }
        )
        for p in range(pools)
    }
    return Catalogue(made, dict.fromkeys(names, "group"))


def durations(pooled: Catalogue, steps: Steps) -> dict[Node, float]:
    """Seconds of every node with its launch."""
    found = {}
    for stage, definition in STAGES.items():
        known = steps.seconds[stage]
        for at, key in enumerate(pooled.keys(definition.scope)):
            if definition.scope in ("model", "member"):
                seconds = known[at % len(known)]
            else:
                seconds = sum(known) / len(known) * len(pooled.members(key)) / steps.models[stage]
            found[stage, key] = seconds + (0.0 if stage == "deployment" else LAUNCH)  # it shares the proof's run
    return found


@dataclass(frozen=True)
class Timeline:
    """When every node ended, and how long the devices were used in all."""

    ends: dict[Node, float]
    used: float

    @property
    def seconds(self) -> float:
        return max(self.ends.values())


def at_once(graph: Graph, seconds: Seconds, devices: int) -> Timeline:
    """List scheduling on `devices` devices and OTHERS places for what scores nothing."""
    order = {node: at for at, node in enumerate(graph)}
    below: dict[Node, list[Node]] = {node: [] for node in graph}
    for node, upstream in graph.items():
        for u in upstream:
            below[u].append(node)
    waits = {node: len(upstream) for node, upstream in graph.items()}
    free = {True: devices, False: OTHERS}
    ready: dict[bool, list[tuple[int, Node]]] = {True: [], False: []}
    running: list[tuple[float, int, Node]] = []
    ends: dict[Node, float] = {}
    now = 0.0

    def offer(node: Node) -> None:
        heapq.heappush(ready[node[0] in SCORES], (order[node], node))

    for node, upstream in graph.items():
        if not upstream:
            offer(node)
    while len(ends) < len(graph):
        for kind, queue in ready.items():
            while queue and free[kind]:
                _, node = heapq.heappop(queue)
                free[kind] -= 1
                heapq.heappush(running, (now + seconds[node], order[node], node))
        now, _, node = heapq.heappop(running)
        ends[node] = now
        free[node[0] in SCORES] += 1
        for child in below[node]:
            waits[child] -= 1
            if not waits[child]:
                offer(child)
    return Timeline(ends, _used(seconds))


def frontiers(graph: Graph) -> list[list[Node]]:
    """What the planner calls stale, one time after the other, in an artifact root that is empty. A proof takes the
    deployment along in its run."""
    stored: dict[Node, Stored] = {}
    found = []
    while frontier := schedule(graph, lambda node: None, stored.get).frontier:
        wave = [*frontier, *(("deployment", key) for stage, key in frontier if stage == "sharing_proof")]
        for node in wave:
            made = fingerprint(node, None, {u: stored[u].data_version for u in graph[node]})
            stored[node] = Stored(made, made)
        found.append(wave)
    return found


def in_waves(graph: Graph, waves: Sequence[Sequence[Node]], seconds: Seconds, devices: int) -> Timeline:
    """One frontier after the other, as the sensor starts them."""
    ends: dict[Node, float] = {}
    now = 0.0
    for wave in waves:
        now += TICK / 2
        within = {node: tuple(u for u in graph[node] if u in wave) for node in wave}
        ends |= {node: now + end for node, end in at_once(within, seconds, devices).ends.items()}
        now = max(ends.values())
    return Timeline(ends, _used(seconds))


def _used(seconds: Seconds) -> float:
    return sum(spent for node, spent in seconds.items() if node[0] in SCORES)


def longest(graph: Graph, seconds: Seconds) -> list[Node]:
    """The chain of nodes that takes longest: no number of devices makes a build shorter."""
    ends: dict[Node, float] = {}
    last: dict[Node, Node | None] = {}
    for node, upstream in graph.items():
        last[node] = max(upstream, key=ends.__getitem__, default=None)
        ends[node] = seconds[node] + (ends[before] if (before := last[node]) is not None else 0.0)
    node: Node | None = max(ends, key=ends.__getitem__)
    chain = []
    while node is not None:
        chain.append(node)
        node = last[node]
    return chain[::-1]


@dataclass(frozen=True)
class Row:
    """`used`: the part of the time for which a device had work, on average, starting at once. Seconds."""

    devices: int
    waves: float
    at_once: float
    used: float


@dataclass(frozen=True)
class Simulation:
    name: str
    told: str
    rows: list[Row]
    chain: dict[str, float]  # stage to its seconds on the longest chain

    @property
    def floor(self) -> float:
        return sum(self.chain.values())

    def text(self) -> str:
        one = self.rows[0]
        lines = [
            (
                f"{r.devices}",
                *(_clock(r.waves), f"{one.waves / r.waves:.1f}x"),
                *(_clock(r.at_once), f"{one.at_once / r.at_once:.1f}x", f"{r.used:.0%}"),
            )
            for r in self.rows
        ]
        head = ("devices", "in waves", "faster", "at once", "faster", "devices busy")
        longest_first = sorted(self.chain.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{stage} {_clock(spent)}" for stage, spent in longest_first if spent > 0.02 * self.floor)
        enough = next((r.devices for r in self.rows if r.at_once <= 1.05 * self.rows[-1].at_once), None)
        told = [
            f"longest chain {_clock(self.floor)}: {parts}",
            f"from {enough} devices on, more bring less than 5 % (starting at once)",
        ]
        return "\n".join([f"SIMULATION: {self.name}, step times of {self.told}", "", table(head, lines), "", *told])


def simulate(steps: Steps, models: int, pools: int) -> Simulation:
    pooled = catalogue(models, pools)
    graph, seconds = pooled.graph(), durations(pooled, steps)
    waves = frontiers(graph)
    rows = []
    for devices in DEVICES:
        waiting, free = in_waves(graph, waves, seconds, devices), at_once(graph, seconds, devices)
        rows.append(Row(devices, waiting.seconds, free.seconds, free.used / (devices * free.seconds)))
    chain: dict[str, float] = {}
    for node in longest(graph, seconds):
        chain[node[0]] = chain.get(node[0], 0.0) + seconds[node]
    named = f"one pool of {models} models" if pools == 1 else f"{pools} pools of {models // pools} models"
    return Simulation(named, steps.told, rows, chain)


def _clock(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02} h" if hours else f"{seconds / 60:.1f} min"


def simulations(kept: list[Path], models: int) -> list[Simulation]:
    return [simulate(Steps.kept(path), models, pools) for path in kept for pools in (1, 10)]


def text(found: list[Simulation]) -> str:
    return "\n\n".join(simulation.text() for simulation in found) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, nargs="+", default=sorted(Path("benchmarks").glob("steps-*.json")))
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/schedule"))
    parser.add_argument("--measure", type=Path, help="take the steps from the build in this artifact root first")
    parser.add_argument("--told", default="a build here", help="what was measured")
    given = parser.parse_args()
    if given.measure:
        measured(given.measure.resolve(), given.told).save(given.steps[0])
    found = simulations(given.steps, given.models)
    given.out.with_suffix(".txt").write_text(text(found))
    plain: list[Any] = [asdict(simulation) for simulation in found]
    given.out.with_suffix(".json").write_text(json.dumps(plain, indent=1) + "\n")
    print(text(found), end="")


if __name__ == "__main__":
    main()
