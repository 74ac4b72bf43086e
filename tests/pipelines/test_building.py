"""What `sandhi build --dry-run` asks of the planner."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.building import dry_run
from sandhi_core.catalogue import Planner
from sandhi_core.graph import Schedule
from tests.pipelines.conftest import PoolWriter


def test_a_dry_run_plans_once(tiny_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, planned = Planner.schedule, []

    def counted(planner: Planner, *arguments: Any) -> Schedule:
        planned.append(schedule(planner, *arguments))
        return planned[-1]

    monkeypatch.setattr(Planner, "schedule", counted)
    document = dry_run(tiny_pool(["a", "b"]), tmp_path / "root")
    (found,) = planned
    assert document["stale"] == [list(node) for node in found.frontier] == [["checkpoint", "a"], ["checkpoint", "b"]]
    assert document["waiting"] == [list(node) for node in found.waiting] and document["plan"]["evaluations"] > 0
