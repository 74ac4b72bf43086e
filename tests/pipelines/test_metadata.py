"""What every materialisation and check carries, read back from the real Dagster instance."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.stages import CHECKS, STAGE_ASSETS
from pipelines.assembly import build_definitions
from pipelines.settings import Settings
from sandhi_core.catalogue import load_catalogue
from sandhi_core.graph import STAGES
from tests.pipelines.conftest import Line

pytestmark = pytest.mark.slow

PICTURES = {
    "profile": "sensitivity",
    "trajectory": "trajectory",
    "holdout": "change",
    "operating_points": "pareto",
    "merged_weights": "who shares what",
    "sharing_proof": "bytes before and after",
}
TABLES = {
    "checkpoint": "what the bytes are",
    "profile": "what noise hurts most",
    "groups": "proposed groups",
    "plan": "steps in order",
    "trajectory": "every step",
    "cutoffs": "every cutoff",
    "holdout": "every look",
    "operating_points": "points",
    "merged_weights": "tensors of several models",
    "sharing_proof": "processes",
    "deployment": "servers",
}
PATHS = {
    "checkpoint": ("directory",),
    "merged_weights": ("export",),
    "deployment": ("specification", "export", "report"),
}
NUMBERS = {
    "checkpoint": ("bytes", "tensors"),
    "profile": ("baseline letters", "largest drop under noise"),
    "groups": ("groups", "slots left out"),
    "plan": ("steps", "bytes planned"),
    "trajectory": ("accepted", "noise floor letters"),
    "cutoffs": ("deepest", "bytes freed at most"),
    "holdout": ("merged letters", "difference letters", "share of budget used letters"),
    "operating_points": ("bytes claimed", "share claimed"),
    "merged_weights": ("merged matrices", "bytes claimed"),
    "sharing_proof": ("bytes verified on disk", "bytes verified in memory", "share verified in memory"),
    "deployment": ("bytes of weights before (estimated)", "bytes of weights after (estimated)"),
}


@pytest.fixture
def instance(tiny_line: Line, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    monkeypatch.setenv("DAGSTER_HOME", str(tiny_line.root / "dagster"))
    with dg.DagsterInstance.get() as opened:
        yield opened


def shown(instance: dg.DagsterInstance, line: Line, stage: str) -> list[Mapping[str, dg.MetadataValue[Any]]]:
    """The newest metadata of every partition."""
    found = []
    for key in load_catalogue([line.pool]).keys(STAGES[stage].scope):
        record = instance.get_latest_data_version_record(dg.AssetKey(stage), partition_key=key)
        assert record is not None and record.asset_materialization is not None
        found.append(record.asset_materialization.metadata)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_every_partition_has_tables_pictures_paths_and_numbers(
    instance: dg.DagsterInstance, tiny_line: Line, stage: str
) -> None:
    for metadata in shown(instance, tiny_line, stage):
        table = metadata[TABLES[stage]]
        assert isinstance(table, dg.TableMetadataValue) and table.records
        if stage in PICTURES:
            picture = metadata[PICTURES[stage]].value
            assert picture.startswith("![") and "](data:image/png;base64," in picture and len(picture) < 350_000
        for name in PATHS.get(stage, ()):
            path = metadata[name]
            assert isinstance(path, dg.PathMetadataValue) and Path(str(path.value)).exists()
        for name in (*NUMBERS[stage], "seconds", "evaluations", "peak resident bytes"):
            assert isinstance(metadata[name], dg.IntMetadataValue | dg.FloatMetadataValue), name
        names = list(metadata)
        assert names.index(TABLES[stage]) <= 2  # what is worth looking at comes before the numbers


def test_every_check_has_numbers_and_says_something(instance: dg.DagsterInstance, tiny_line: Line) -> None:
    key = dg.AssetKey("sharing_proof")
    for name in CHECKS:
        (record,) = instance.event_log_storage.get_asset_check_execution_history(dg.AssetCheckKey(key, name), limit=1)
        assert record.event is not None
        event = record.event.dagster_event
        assert event is not None
        found = event.asset_check_evaluation_data
        assert found.description and found.passed == (name != "measured_as_deployed")
        if name != "measured_as_deployed":
            assert any(isinstance(v, dg.IntMetadataValue | dg.FloatMetadataValue) for v in found.metadata.values())


def test_the_graph_is_readable(tiny_line: Line) -> None:
    catalogue = load_catalogue([tiny_line.pool])
    graph = build_definitions(catalogue, Settings(tiny_line.pool, tiny_line.root)).resolve_asset_graph()
    groups = {}
    for stage in STAGE_ASSETS.values():
        node = graph.get(dg.AssetKey(stage.name))
        groups[stage.name] = node.group_name
        assert node.owners == ["team:letters"]
        assert node.tags["sandhi/one-per"] == STAGES[stage.name].scope
        assert node.tags["sandhi/scores"] == ("yes" if stage.scores else "no")
        assert node.description and "One partition" in node.description
        assert stage.kinds or stage.name in ("groups", "plan", "cutoffs", "operating_points", "deployment")
    assert list(dict.fromkeys(groups.values())) == ["models", "search", "serving"]  # in the order in which they run
    for name in CHECKS:
        spec = graph.get_check_spec(dg.AssetCheckKey(dg.AssetKey("sharing_proof"), name))
        assert spec.description == CHECKS[name] and spec.blocking


def test_the_log_tells_of_evaluations_with_what_is_left(instance: dg.DagsterInstance, tiny_line: Line) -> None:
    record = instance.get_latest_data_version_record(dg.AssetKey("profile"), partition_key="a")
    assert record is not None
    lines = [e.user_message for e in instance.all_logs(record.run_id) if "evaluation " in (e.user_message or "")]
    assert lines and lines[0].startswith("evaluation 1 of a in 0:0") and "at most" in lines[0]
    metadata = shown(instance, tiny_line, "profile")[0]
    assert len(lines) <= int(str(metadata["evaluations"].value))
