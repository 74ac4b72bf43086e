"""A simulation: how long a pool of a hundred models would take on 1, 8 and 64 devices.

    python -m benchmarks.schedule [--steps benchmarks/steps-*.json] [--models 100] [--out benchmarks/schedule]
    python -m benchmarks.schedule --measure .sandhi --told "the demo pool" --steps benchmarks/steps-demo.json

Nothing here ran on that many devices. Real are the graph (Catalogue.graph of a pool with that many models), by which
the planner says what may run when, and how long each step took in a build of few models (benchmarks/steps.py,
kept beside this file). Assumed are:

- a model takes as long as one of those that were measured, in turn; a step that is one for a group or a pool takes
  longer in proportion to its models;
- a run needs LAUNCH seconds besides its step, to start a process that imports everything;
- a run that scores takes a device, any other one of OTHERS places beside; a device is as fast as what was measured on;
- storage and the instance's database are never what is waited for.

Two ways of starting runs are compared. By the sensor: it looks every LOOK seconds and starts what does not depend on
anything under way. At once: every run starts as soon as its upstreams have ended. Either way those wait that find no
place, and are taken in the order of the graph (list scheduling, Graham 1966). Both are deterministic.
"""

import argparse
import heapq
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assets.stages import STAGE_ASSETS
from benchmarks.rows import table
from benchmarks.steps import Steps, measured
from sandhi_core.graph import STAGES, Catalogue, Node
from sandhi_core.pools.pool import Pool

DEVICES = (1, 2, 4, 8, 16, 32, 64, 128)
LAUNCH = 10.0
LOOK = 30.0
OTHERS = 16
SCORES = frozenset(name for name, stage in STAGE_ASSETS.items() if stage.scores)

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


def timeline(graph: Graph, seconds: Seconds, devices: int, look: float = 0.0) -> Timeline:
    """List scheduling on `devices` devices and OTHERS places for what scores nothing; runs are started at multiples of
    `look` seconds, or at once where that is 0."""
    order = {node: at for at, node in enumerate(graph)}
    below: dict[Node, list[Node]] = {node: [] for node in graph}
    for node, upstream in graph.items():
        for u in upstream:
            below[u].append(node)
    waits = {node: len(upstream) for node, upstream in graph.items()}
    free = {True: devices, False: OTHERS}
    queues: dict[bool, list[tuple[int, Node]]] = {True: [], False: []}
    # (when, in what order, node, whether it ends then or may start)
    events = [(0.0, order[node], node, False) for node, upstream in graph.items() if not upstream]
    ends: dict[Node, float] = {}
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, node, ended = heapq.heappop(events)
            if not ended:
                heapq.heappush(queues[node[0] in SCORES], (order[node], node))
                continue
            ends[node] = now
            free[node[0] in SCORES] += 1
            for child in below[node]:
                waits[child] -= 1
                if not waits[child]:
                    seen = math.ceil(now / look) * look if look else now
                    heapq.heappush(events, (seen, order[child], child, False))
        for kind, queue in queues.items():
            while queue and free[kind]:
                _, node = heapq.heappop(queue)
                free[kind] -= 1
                heapq.heappush(events, (now + seconds[node], order[node], node, True))
    return Timeline(ends, sum(spent for node, spent in seconds.items() if node[0] in SCORES))


def longest(graph: Graph, seconds: Seconds) -> list[Node]:
    """The chain of nodes that takes longest: no number of devices makes a build shorter."""
    ends: dict[Node, float] = {}
    last: dict[Node, Node | None] = {}
    for node, upstream in graph.items():
        before = last[node] = max(upstream, key=ends.__getitem__, default=None)
        ends[node] = seconds[node] + (0.0 if before is None else ends[before])
    chain = []
    at: Node | None = max(ends, key=ends.__getitem__)
    while at is not None:
        chain.append(at)
        at = last[at]
    return chain[::-1]


@dataclass(frozen=True)
class Row:
    """`used`: the part of the time for which a device had work, on average, starting at once. Seconds."""

    devices: int
    sensor: float
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
                *(_clock(r.sensor), f"{one.sensor / r.sensor:.1f}x"),
                *(_clock(r.at_once), f"{one.at_once / r.at_once:.1f}x", f"{r.used:.0%}"),
            )
            for r in self.rows
        ]
        head = ("devices", "by the sensor", "faster", "at once", "faster", "devices busy")
        longest_first = sorted(self.chain.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{stage} {_clock(spent)}" for stage, spent in longest_first if spent > 0.02 * self.floor)
        told = [f"longest chain {_clock(self.floor)}: {parts}", _enough(self.rows)]
        return "\n".join([f"SIMULATION: {self.name}, step times of {self.told}", "", table(head, lines), "", *told])


def _enough(rows: Sequence[Row]) -> str:
    """From where on no doubling is worth it, starting at once."""
    gains = [before.at_once / after.at_once for before, after in itertools.pairwise(rows)]
    last = max((at for at, gain in enumerate(gains) if gain >= 1.05), default=-1)
    if last == len(gains) - 1:
        return f"up to {rows[-1].devices} devices every doubling brings 5 % or more"
    return f"from {rows[last + 1].devices} devices on, a doubling brings less than 5 %"


def simulate(steps: Steps, models: int, pools: int) -> Simulation:
    pooled = catalogue(models, pools)
    graph, seconds = pooled.graph(), durations(pooled, steps)
    rows = []
    for devices in DEVICES:
        sensor, free = timeline(graph, seconds, devices, LOOK), timeline(graph, seconds, devices)
        rows.append(Row(devices, sensor.seconds, free.seconds, free.used / (devices * free.seconds)))
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
