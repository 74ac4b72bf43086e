"""The tables of docs/reference.md, each figure from the recordings by Sandhi's own code."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sandhi_core.records import Savings
from tests.conformance.acceptance import drifted
from tests.conformance.candidates import recorded_clusterings
from tests.conformance.ceilings import compatible, tolerant
from tests.conformance.points import compared
from tests.conformance.recorded import POINTS, RecordedModel, RecordedRun, read_rows, recorded_runs
from tests.conformance.test_grouping import grouped

CANDIDATES_GATE = 0.1  # run_config.txt of both recorded clusterings


def tables(artifact: Path) -> str:
    """All tables as Markdown, each under its heading."""
    runs = list(recorded_runs(artifact))
    parts = [
        ("Operating points", _points(runs)),
        ("Acceptance", _acceptance(runs)),
        ("Grouping", _grouping(artifact)),
        ("The gate", _gates(artifact)),
        ("Where the bytes are", _ceilings(runs)),
        ("LoRA extraction, rank 128, as the paper measured it", _adapters(artifact)),
    ]
    return "\n".join(f"### {title}\n\n{table}" for title, table in parts)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _points(runs: Iterable[RecordedRun]) -> str:
    rows = []
    for run in runs:
        for point in compared(run):
            rows.append(
                (
                    run.name,
                    point.row["point"],
                    point.row["criterion"],
                    f"{point.recorded:.2f} %",
                    f"{point.gross:.2f} %",
                    f"{point.net:.2f} %",
                )
            )
    return _markdown(("run", "point", "criterion", "recorded", "ours, gross", "ours, net of corrections"), rows)


def _acceptance(runs: Iterable[RecordedRun]) -> str:
    rows = []
    for run in runs:
        for model in run.models:
            accepted = [s for s in model.trajectory.steps if s.decision == "accepted"]
            drifts = drifted(model)
            rows.append((run.name, model.label, len(model.log), len(accepted), len(drifts), _worst(model, drifts)))
    return _markdown(("run", "model", "steps", "accepted", "beyond the budget", "worst of these"), rows)


def _worst(model: RecordedModel, drifts: Sequence[int]) -> str:
    """The largest drop against the original among `drifts`, in points."""
    scores = [model.trajectory.steps[i].scores for i in drifts]
    drops = [model.baseline - s[model.task] for s in scores if s is not None]
    return f"{POINTS * max(drops):.2f} points of {POINTS * model.tolerance[model.task]:g}" if drops else "none"


def _grouping(artifact: Path) -> str:
    rows = []
    for clustering in recorded_clusterings(artifact):
        recorded = clustering.recorded()
        counts = [sum(stage == n for stage, *_ in recorded) for n in (1, 2)]
        if clustering.statistics is None:
            found = "no statistics recorded"
        else:
            ours = {
                (g.stage, g.recipe.projection, tuple((c.model, c.layer) for c in g.recipe.contributors))
                for g in grouped(clustering).groups
            }
            found = f"{len(ours & recorded)} the same, {len(ours ^ recorded)} not"
        rows.append((clustering.name, len(clustering.proposals), *counts, found))
    return _markdown(("proposals", "models", "stage 1", "stage 2", "ours from the statistics"), rows)


def _gates(artifact: Path) -> str:
    """Components that entered a recorded clustering beside those that the recorded profiles let pass at its gate. Of
    runs only what was proposed is known to have entered."""
    runs = list(recorded_runs(artifact))
    profiles = {m.name: m.profile for run in runs for m in run.models if m.profile is not None}
    rows = []
    for clustering in recorded_clusterings(artifact):
        gate = next((run.gate for run in runs if clustering.name == f"runs/{run.name}"), CANDIDATES_GATE)
        for model, entered in sorted(clustering.entered().items()):
            if model in profiles:
                passed = {(s.component, s.layer) for s in profiles[model].sensitivities if s.drop <= gate + 1e-9}
                counts = len(entered), len(passed), len(entered & passed)
                rows.append((clustering.name, model, f"{POINTS * gate:g} points", *counts))
    return _markdown(("clustering", "model", "gate", "entered", "pass", "both"), rows)


def _ceilings(runs: Iterable[RecordedRun]) -> str:
    rows = []
    for run in runs:
        points = {p.row["point"]: p for p in compared(run)}
        best = max(points.values(), key=lambda p: p.recorded)
        profiled = all(m.profile is not None for m in run.models)
        rows.append(
            (
                run.name,
                len(run.models),
                f"{best.recorded:.2f} % ({best.row['point']})",
                _share(tolerant(run)) if profiled else "no profiles",
                _share(compatible(run)),
            )
        )
    header = ("run", "models", "the reference reached", "every tolerant same-layer slot", "every compatible slot")
    return _markdown(header, rows)


def _share(found: Savings) -> str:
    return f"{100 * found.net / found.checkpoint_bytes:.2f} %"


def _adapters(artifact: Path) -> str:
    """The paper's memory table beside the accuracy of its adapters, in points against the fine-tune."""
    memory = {r["Configuration"]: r for r in read_rows(artifact / "paper" / "memory_savings.csv")}
    rows = []
    for configuration, file in (
        ("5-llama", "lora_llama_adapter_acc.csv"),
        ("3-Qwen-32B", "lora_qwen32b_adapter_acc.csv"),
    ):
        for r in read_rows(artifact / "paper" / file):
            lora, tuned = float(r["lora_acc"]), float(r["ft_acc"])
            if tuned:
                rows.append((configuration, re.sub(r".*/", "", r["model"]), f"{POINTS * (lora - tuned):+.1f}"))
    saved = [
        (name, r["Num Models"], f"{float(r['LoRA (%)']):.1f} %", f"{float(r['Sandhi (%)']):.1f} %")
        for name, r in memory.items()
        if r["LoRA (GB)"] != "x"  # adapters were trained
    ]
    header = ("configuration", "models", "LoRA saves", "SANDHI saves")
    return _markdown(header, saved) + "\n" + _markdown(("configuration", "model", "LoRA against the fine-tune"), rows)
