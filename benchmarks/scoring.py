"""How much faster scoring is than the ways it replaces, side by side in one run on the same questions.

Prints a table and then, on the last line, all figures as one JSON object.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.changes import Source
from benchmarks.generation import generation
from benchmarks.growth import Curve, growth, plot
from benchmarks.models import smollm2
from benchmarks.questions import SHOTS, TASKS
from benchmarks.rows import Row, compared, peak_mib
from benchmarks.sweep import sweep
from benchmarks.trajectory import trajectory
from benchmarks.ways import say

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("sweep", "reference", "trajectory", "generation", "growth")
CACHE = ROOT / ".sandhi-demo" / "bench"
DEMO = ROOT / ".sandhi-demo" / "demo" / "models"
EXAMPLE = """rows:
  sweep       noise in every component once: ours, against lm-eval's model in memory
  reference   the same, against saving every changed checkpoint and a new lm_eval process for it
  trajectory  one model's walk: gallop with ours, against stride 1 with lm-eval's model in memory
  generation  outputs after a small change: from drafts, against generating again
  growth      one full pass by layers, questions and choices

example:
  python -m benchmarks.scoring --rows sweep generation --questions 100"""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scoring",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint; default: SmolLM2-135M, fetched once")
    parser.add_argument(
        "--pair", type=Path, nargs="+", metavar="DIR", default=[DEMO / "converter", DEMO / "inflector"],
        help="trajectory: the walking model and the one it merges with, itself with noise if one is given; "
        "default: the demo pool's converter and inflector",
    )  # fmt: skip
    parser.add_argument(
        "--keep", nargs="+", choices=TASKS, default=["units"], metavar="TASK",
        help="trajectory: tasks that the walking model has to keep; default: units, the converter's",
    )  # fmt: skip
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="of each task; default: %(default)s")
    parser.add_argument(
        "--shots", type=int, default=SHOTS, metavar="N",
        help="solved examples before every question, but for the trajectory; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--components", type=int, default=3, metavar="K",
        help="lm-eval's model is timed on so many, the rest extrapolated; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, default=6, metavar="P",
        help="lm_eval processes that are timed, the rest extrapolated; 0: none; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="S", help="stride 1 walks so many, the rest extrapolated")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the walk; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="FILE.txt, FILE.json and FILE-growth.png keep what is found; default: benchmarks/scoring-MODEL",
    )
    options = parser.parse_args(arguments)
    counts = (options.questions, options.components, options.threads, 1 if options.steps is None else options.steps)
    if min(counts) < 1 or min(options.processes, options.shots) < 0:
        parser.error("numbers must be at least 1; --processes and --shots at least 0")
    if len(options.pair) > 2:
        parser.error("--pair takes one or two checkpoints")
    if "trajectory" in options.rows and (gone := [path for path in options.pair if not path.is_dir()]):
        parser.error(f"{gone[0]} is no folder; the demo pool: python -m demo.make_pool .sandhi-demo/demo --size demo")
    return options


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("torch", "transformers", "lm_eval")},
    }


def _measured(options: argparse.Namespace, model: Path, folder: Path) -> Iterator[list[Row] | list[Curve]]:
    """What is found, as soon as it is."""
    source = Source(model, folder / "scans")
    common = {"questions": options.questions, "threads": options.threads}
    shots = {"shots": options.shots}
    if {"sweep", "reference"} & set(options.rows):
        processes = options.processes if "reference" in options.rows else 0
        found = sweep(
            source, _fresh(folder, "sweep"), components=options.components, processes=processes, **shots, **common
        )
        yield [row for row in found if row.name in options.rows]
    if "trajectory" in options.rows:
        first, *others = [Source(path.resolve(), folder / "scans") for path in options.pair]
        walk = {"steps": options.steps, "tolerance": options.tolerance}
        pair = first, others[0] if others else None
        yield [trajectory(pair, options.keep, _fresh(folder, "trajectory"), **walk, **common)]
    if "generation" in options.rows:
        yield [generation(source, _fresh(folder, "generation"), **shots, **common)]
    if "growth" in options.rows:
        yield growth(model, source.fingerprint.layers, _fresh(folder, "growth"), **shots, **common)


def _fresh(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def _kept(
    options: argparse.Namespace, model: str, rows: list[Row], curves: list[Curve], spent: float
) -> tuple[str, dict[str, Any]]:
    """Writes what was found so far; gives it as text and as figures."""
    machine = _machine()
    conditions = (
        f"{options.questions} questions a task, {options.shots} solved examples before each (trajectory: none), "
        f"float32, {options.threads} threads on {machine['cores']} cores of {machine['cpu']}; "
        + ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    )
    parts = [conditions, compared(rows) if rows else ""]
    if curves:
        plot(curves, f"{model}, {options.threads} threads", options.out.with_name(f"{options.out.name}-growth.png"))
        parts += [f"growth of one full pass, {model} (peak {peak_mib():,} MiB)", *map(str, curves)]
    text = "\n\n".join(filter(None, parts))
    figures = {
        "model": model,
        "questions": options.questions,
        "shots": options.shots,
        "threads": options.threads,
        "machine": machine,
        "rows": [row.plain() for row in rows],
        "growth": {curve.by: {"points": curve.points, "to_linear": curve.ratios()} for curve in curves},
        "peak_mib": peak_mib(),
        "seconds": spent,
    }
    # A model's name may hold a dot, so that nothing in it is taken for an ending.
    options.out.with_name(f"{options.out.name}.txt").write_text(text + "\n")
    options.out.with_name(f"{options.out.name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    return text, figures


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = _options(arguments)
    begun = time.perf_counter()
    try:
        # Only the demo pool's pair needs no other model.
        needed = set(options.rows) != {"trajectory"}
        model = (options.model or smollm2(CACHE)).resolve() if needed else options.pair[0].resolve()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out = options.out or ROOT / "benchmarks" / f"scoring-{model.name}"
    say(f"measuring {model.name}: {', '.join(options.rows)}")
    rows: list[Row] = []
    curves: list[Curve] = []
    with tempfile.TemporaryDirectory(prefix="sandhi-bench-") as name:
        for found in _measured(options, model, Path(name)):
            rows += [one for one in found if isinstance(one, Row)]
            curves += [one for one in found if isinstance(one, Curve)]
            # After every row: a run takes long, and what it has found is not lost with it.
            text, figures = _kept(options, model.name, rows, curves, time.perf_counter() - begun)
    print(text)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
