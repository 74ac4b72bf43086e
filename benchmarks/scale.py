"""What checking and planning cost for many large models, whose weights lie nowhere.

    python -m benchmarks.scale [--out benchmarks/scale]

12 models of the shape of Llama 3 8B and 100 of 70B, header-only (benchmarks.hollow): everything is real but the data,
of which there is none. Each row is a process of its own; its seconds are those of the wall clock and of its processor
time, its peak is the most that it had resident (ru_maxrss). Goals: 60 s of processor time and 4 GiB a row.

- check, dry run: `sandhi check --headers-only` and `sandhi build --dry-run --headers-only`. The disk of this machine is
  too small for the exports of such pools, which the check says, and which is the only error it may find.
- kinship, grouping, planning: the code of the stages `groups` and `plan`, on the fingerprints of the check and on
  profiles and row means that are made up (both take weights and scoring), with every record written and read as the
  stages do. A digest names no bytes: no two are equal.
- what is stale: the planner, with all of these records in the artifact root.

What a check without --headers-only reads besides is bytes, at the speed of benchmarks.streaming's `check`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.hollow import hollow_pool
from benchmarks.rows import seconds, table
from benchmarks.ways import say
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.grouping.groups import make_groups, make_plan
from sandhi_core.grouping.kinship import families
from sandhi_core.moments import RowStatistics
from sandhi_core.pools.pool import Pool
from sandhi_core.preflight.checks import check_model
from sandhi_core.records import Component, Fingerprint, Groups, Profile, Sensitivity
from sandhi_core.words import size

POOLS = {"8B": 12, "70B": 100}


@dataclass(frozen=True)
class Cost:
    """One part of the work in a process of its own."""

    pool: str
    part: str
    wall: float
    cpu: float
    peak_mib: int
    note: str


@contextmanager
def _timed(found: dict[str, list[float]], part: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    found[part] = [time.perf_counter() - wall, time.process_time() - cpu]


def plan_all(file: Path, root: Path) -> dict[str, list[float]]:
    """Kinship, groups and all plans of a pool, in seconds (wall, processor); raises if a plan is not complete."""
    (pool,) = load_catalogue([file]).pools.values()
    found: dict[str, list[float]] = {}
    with _timed(found, "outlines"):
        outlines = dict(_outlines(pool))
    profiles = {model: made_up(f) for model, f in outlines.items()}
    artifacts, key = Artifacts(root), f"{pool.name}.all"
    with _timed(found, "kinship"):
        related = families(outlines, _rows())
    with _timed(found, "grouping"):
        record = make_groups(
            pool.name, "all", outlines, profiles, pool.grouping, pool.merging, pool.profile.gate, None, related
        )
        artifacts.save(("groups", key), "", {}, record)
    with _timed(found, "planning"):
        for model, outlined in outlines.items():
            groups = artifacts.load(Groups, "groups", key)
            made = make_plan(groups, outlined, profiles[model], pool.name)
            artifacts.save(("plan", f"{pool.name}.{model}"), "", {}, made)
            if sum(len(step.merges) for step in made.steps) != len(outlined.slots):
                raise RuntimeError(f"the plan of {model} has not every slot")
    with _timed(found, "what is stale"):
        Planner(load_catalogue([file]), artifacts).schedule()
    return found


def _outlines(pool: Pool) -> Iterator[tuple[str, Fingerprint]]:
    for entry in pool.models:
        problems, found = check_model(entry, None, deep=False)
        if found is None:
            raise RuntimeError(problems[0].line())
        yield entry.name, found


def made_up(found: Fingerprint) -> Profile:
    """A profile in which noise costs nothing anywhere."""
    places: list[tuple[int, Component]] = [(n, c) for n in range(found.layers) for c in ("attn", "mlp")]
    return Profile(
        model=found.model,
        fingerprint=found.digest,
        seeds=(1234,),
        questions={"numbers": 120},
        baseline={"numbers": 0.5},
        sensitivities=tuple(Sensitivity(layer=n, component=c, scores={"numbers": 0.5}, drop=0.0) for n, c in places),
    )


def _rows() -> Callable[[Fingerprint, str], RowStatistics]:
    """Row means as fine-tunes of one base have them: the same but for a little."""

    sizes: dict[str, dict[str, int]] = {}

    @cache
    def base(rows: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(rows).normal(size=rows).astype(np.float32))

    def rows(found: Fingerprint, tensor: str) -> RowStatistics:
        if found.model not in sizes:
            sizes[found.model] = {t.name: t.shape[0] for t in found.tensors}
        common = base(sizes[found.model][tensor])
        noise = np.random.default_rng(len(found.model)).normal(size=len(common)).astype(np.float32)
        return RowStatistics(common + 0.01 * torch.from_numpy(noise), torch.ones(len(common)))

    return rows


def _child(*arguments: str) -> tuple[int, float, float, int, str]:
    """Run a command: exit status, seconds by the wall and of the processor, peak MiB, standard output."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen([sys.executable, *arguments], stdout=out) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        took = time.perf_counter() - begun, used.ru_utime + used.ru_stime
        return process.returncode, *took, used.ru_maxrss // 1024, out.read()


def _command(pool: str, part: str, *arguments: str) -> Cost:
    _, wall, cpu, peak, out = _child("-m", "sandhi_core", *arguments, "--headers-only", "--json")
    document = json.loads(out)
    errors = {p["code"] for p in document["problems"] if p["severity"] == "error"}
    if errors - {"disk-space"}:
        raise RuntimeError(f"{part} of {pool}: {document['problems']}")
    plan = document["plan"]
    (group,) = plan["groups"]
    stale = f", {len(document['stale'])} stale and {len(document['waiting'])} waiting" if "stale" in document else ""
    note = (
        f"{len(group['models'])} models, {group['sets']} matrices in common, {size(plan['bytes_read'])} to read{stale}"
    )
    return Cost(pool, part, wall, cpu, peak, note)


def costs(pool: str, file: Path, root: Path) -> Iterator[Cost]:
    yield _command(pool, "check", "check", str(file), "--root", str(root))
    yield _command(pool, "dry run", "build", str(file), "--root", str(root), "--dry-run")
    status, _, _, peak, out = _child("-m", "benchmarks.scale", "--plan", str(file), str(root))
    if status:
        raise RuntimeError(f"planning {pool} failed")
    for part, (wall, cpu) in json.loads(out).items():
        yield Cost(pool, part, wall, cpu, peak, "one process for these: its peak is that of all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write PATH.txt and PATH.json too")
    parser.add_argument("--plan", nargs=2, type=Path, metavar=("POOL", "ROOT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plan:
        print(json.dumps(plan_all(*given.plan)))
        return
    found: list[Cost] = []
    for shape, models in POOLS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = hollow_pool(Path(folder), shape, models)
            for cost in costs(f"{models} x {shape}", file, Path(folder) / "root"):
                say(f"{cost.pool}, {cost.part}: {cost.cpu:.1f} s, {cost.peak_mib} MiB")
                found.append(cost)
    head = ("pool", "part", "wall, s", "processor, s", "peak MiB", "")
    lines = [(c.pool, c.part, seconds(c.wall), seconds(c.cpu), f"{c.peak_mib:,}", c.note) for c in found]
    text = table(head, lines)
    print(text)
    if given.out is not None:
        given.out.with_suffix(".txt").write_text(text + "\n")
        given.out.with_suffix(".json").write_text(json.dumps([asdict(c) for c in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
