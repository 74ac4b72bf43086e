"""A recorded run as a pool with an artifact root, so that `sandhi report` draws it like any other."""

from pathlib import Path

import yaml

from sandhi_core.artifacts import Artifacts
from sandhi_core.records import Record
from tests.conformance.points import points_of
from tests.conformance.recorded import RecordedRun


def write_pool(run: RecordedRun, folder: Path) -> Path:
    """Write `NAME.yaml` into `folder` and the run's records into its artifact root, `folder`/root; returns the pool
    file. Records of models carry what was recorded and nothing else: no checkpoint is there to be built from."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(_document(run), sort_keys=False))
    artifacts = Artifacts(folder / "root")

    def save(stage: str, key: str, record: Record) -> None:
        artifacts.save((stage, key), "", None, record)

    for model in run.models:
        save("checkpoint", model.name, model.fingerprint)
        if model.profile is not None:
            save("profile", model.name, model.profile)
        for stage in ("plan", "trajectory", "cutoffs"):
            save(stage, f"{run.name}.{model.name}", getattr(model, stage))
    save("operating_points", run.name, points_of(run))
    return file


def _document(run: RecordedRun) -> dict[str, object]:
    return {
        "name": run.name,
        "models": [
            {
                "name": m.name,
                "path": f"recorded/{m.name}",
                "tasks": [{"task": m.task, "metric": "acc", "budget": m.tolerance[m.task]}],
            }
            for m in run.models
        ],
        "profile": {"gate": run.gate},
        "grouping": {"candidates": "reference"},
        "search": {"accept": "reference", "stride": 1},
    }
