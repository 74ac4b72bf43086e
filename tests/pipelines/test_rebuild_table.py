"""What re-runs when, edit by edit, as docs/rebuilds.md says it: by the command line, and by the sensor's runs."""

import dataclasses
import hashlib
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import dagster as dg
import pytest
import torch
from safetensors.torch import load_file

from pipelines.assembly import build_definitions
from pipelines.headless import build
from pipelines.instance import opened_instance
from pipelines.progress import Progress
from pipelines.settings import Settings
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.graph import STAGES, Node
from sandhi_core.layout import read_manifest
from sandhi_core.records import Groups
from tests.conftest import CHECKOUT
from tests.pipelines.conftest import line_alone, without_home
from tests.pipelines.life import Done, Life, copied, events, inconsistent, since

pytestmark = pytest.mark.slow


class Row(NamedTuple):
    """What is done, what runs, and of that what scores a model anew; in the words of the page."""

    edit: str
    runs: str
    scores: str


TABLE = (
    Row(
        "nothing",
        "nothing",
        "nothing",
    ),
    Row(
        "f is added to p (`on_new_model: join`)",
        "checkpoint, profile: f; groups: p.narrow; plan: p.a, p.b, p.c, p.f; walk: p.f; end: p",
        "profile: f; trajectory, holdout: p.f",
    ),
    Row(
        "f is added to q (`on_new_model: regroup`)",
        "checkpoint, profile: f; groups: q.narrow; plan, walk: q.d, q.e, q.f; end: q",
        "profile: f; trajectory, holdout: q.d, q.e, q.f",
    ),
    Row(
        "c is removed from p",
        "groups: p.narrow; plan, walk: p.a, p.b; end: p",
        "trajectory, holdout: p.a, p.b",
    ),
    Row(
        "weights of a",
        "checkpoint, profile: a; groups: p.narrow; plan, walk: p.a, p.b, p.c; end: p",
        "profile: a; trajectory, holdout: p.a, p.b, p.c",
    ),
    Row(
        "the file of task `numbers`",
        "profile: c; groups: p.narrow; plan, walk: p.c; end: p",
        "profile: c; trajectory, holdout: p.c",
    ),
    Row(
        "budget of b, in p (`tolerance` set)",
        "cutoffs, holdout: p.b; end: p",
        "nothing",
    ),
    Row(
        "budget of d, in q (no `tolerance`)",
        "walk: q.d; end: q",
        "trajectory, holdout: q.d",
    ),
    Row(
        "`search.tolerance` of p",
        "walk: p.a, p.b, p.c, p.u, p.v; end: p",
        "trajectory: p.b, p.c; holdout: p.c",
    ),
    Row(
        "`search.stride` of q",
        "trajectory: q.d, q.e; cutoffs, holdout: q.d; end: q",
        "nothing",
    ),
    Row(
        "`evaluation.dtype` of q",
        "profile: d, e; trajectory: q.d, q.e; cutoffs: q.d; holdout: q.d, q.e; end: q",
        "profile: d, e; trajectory, holdout: q.d, q.e",
    ),
    Row(
        "`evaluation.device` of q, to another of the same kind",
        "nothing",
        "nothing",
    ),
    Row(
        "`deploy.device_memory` of q",
        "deployment: q",
        "nothing",
    ),
    Row(
        "pool r is added, of a (which p has too) and the new g",
        "checkpoint, profile: g; groups: r.narrow; plan, walk: r.a, r.g; end: r",
        "profile: g; trajectory, holdout: r.a, r.g",
    ),
    Row(
        "pool q is called r",
        "groups: r.narrow; plan, walk: r.d, r.e; end: r",
        "nothing",
    ),
    Row(
        "pool q is deleted",
        "nothing",
        "nothing",
    ),
    Row(
        "`--regroup`, or the time that `rebuild` names; nothing joined since",
        "groups: p.narrow, p.wide, q.narrow",
        "nothing",
    ),
    Row(
        "a new version of Sandhi, with another of `trajectory`",
        "trajectory: p.a, p.b, p.c, p.u, p.v, q.d, q.e",
        "nothing",
    ),
    Row(
        "DAGSTER_HOME is lost",
        "nothing",
        "nothing",
    ),
    Row(
        "the artifact root is lost",
        "checkpoint, profile: a, b, c, d, e, u, v; groups: p.narrow, p.wide, q.narrow; "
        "plan, walk: p.a, p.b, p.c, p.u, p.v, q.d, q.e; end: p, q",
        "profile: a, b, c, d, e, u, v; trajectory, holdout: p.a, p.b, p.c, p.u, p.v, q.d, q.e",
    ),
)

WORDS = {"walk": ("trajectory", "cutoffs", "holdout"), "end": tuple(s for s, t in STAGES.items() if t.scope == "pool")}
GROUPS = {"narrow": "h32-bf16", "wide": "h64-bf16"}


def nodes(cell: str) -> set[Node]:
    """`plan: p.a, p.b; walk: p.b` as nodes."""
    if cell == "nothing":
        return set()
    found = set()
    for clause in cell.split("; "):
        stages, _, keys = clause.partition(": ")
        for key in keys.split(", "):
            pool, dot, rest = key.partition(".")
            for stage in stages.split(", "):
                found |= {(one, pool + dot + GROUPS.get(rest, rest)) for one in WORDS.get(stage, (stage,))}
    return found


def renamed(life: Life) -> None:
    text = life.file("q").read_text()
    life.file("q").unlink()
    life.file("r").write_text(re.sub("^name: q$", "name: r", text, flags=re.MULTILINE))


def reworded(life: Life) -> None:
    with (life.folder / "tasks" / "numbers.yaml").open("a") as file:
        file.write("description: 'Which numbers come next? '\n")


Change = Callable[[Life], None]
EDITS: dict[str, Change] = {
    "nothing": lambda life: None,
    "f is added to p (`on_new_model: join`)": lambda life: life.write("p", "abcfuv"),
    "f is added to q (`on_new_model: regroup`)": lambda life: life.write("q", "def"),
    "c is removed from p": lambda life: life.write("p", "abuv"),
    "weights of a": lambda life: life.move("a"),
    "the file of task `numbers`": reworded,
    "budget of b, in p (`tolerance` set)": lambda life: life.write("p", budgets={"b": 0.05}),
    "budget of d, in q (no `tolerance`)": lambda life: life.write("q", budgets={"d": 0.05}),
    "`search.tolerance` of p": lambda life: life.write("p", search={"tolerance": 0.3}),
    "`search.stride` of q": lambda life: life.write("q", search={"stride": 1}),
    "`evaluation.dtype` of q": lambda life: life.write("q", evaluation={"dtype": "bfloat16"}),
    "`evaluation.device` of q, to another of the same kind": lambda life: life.write(
        "q", evaluation={"device": "auto"}
    ),
    "`deploy.device_memory` of q": lambda life: life.write("q", deploy={"device_memory": "40GiB"}),
    "pool r is added, of a (which p has too) and the new g": lambda life: life.write("r", "ag"),
    "pool q is called r": renamed,
    "pool q is deleted": lambda life: life.file("q").unlink(),
}
BY_SENSOR = (
    "nothing",
    "f is added to p (`on_new_model: join`)",
    "budget of b, in p (`tolerance` set)",
    "`deploy.device_memory` of q",
)
ROOT_LOST = "the artifact root is lost"
HOME_LOST = "DAGSTER_HOME is lost"
VERSION = "a new version of Sandhi, with another of `trajectory`"
REGROUPED = "`--regroup`, or the time that `rebuild` names; nothing joined since"


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    return Life.begun(tmp_path_factory.mktemp("life"))


@pytest.fixture(scope="module")
def first(life: Life, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of both pools, built from nothing. Tests must leave it as it is."""
    root = tmp_path_factory.mktemp("first") / "root"
    with line_alone(), without_home():
        done = by_command(life.settings(root))
    held(row(ROOT_LOST), done)
    assert set(done.ran) == set(load_catalogue(life.settings(root).pool_files()).graph())
    return root


def by_command(settings: Settings, *, regroup: bool = False) -> Done:
    before = events(settings.root)
    build(load_catalogue(settings.pool_files()), settings, Progress({}, io.StringIO()), regroup=regroup)
    return since(before, settings.root)


def by_sensor(settings: Settings) -> Done:
    """The sensor tick by tick, each run as the daemon would start it."""
    before = events(settings.root)
    definitions = build_definitions(load_catalogue(settings.pool_files()), settings)
    sensor = definitions.resolve_sensor_def("rebuild_stale")
    with opened_instance(settings.root) as instance:
        while requests := sensor.evaluate_tick(dg.build_sensor_context(instance, definitions=definitions)).run_requests:
            for request in requests:
                start(definitions, instance, request)
    return since(before, settings.root)


def start(definitions: dg.Definitions, instance: dg.DagsterInstance, request: dg.RunRequest) -> None:
    assert request.job_name is not None and request.asset_selection is not None and request.run_key is not None
    result = definitions.resolve_job_def(request.job_name).execute_in_process(
        instance=instance,
        partition_key=request.partition_key,
        asset_selection=list(request.asset_selection),
        tags={**request.tags, "dagster/run_key": request.run_key},
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
    )
    assert result.success


def row(edit: str) -> Row:
    return next(row for row in TABLE if row.edit == edit)


def held(row: Row, done: Done) -> None:
    assert set(done.ran) == nodes(row.runs)
    assert len(done.ran) == len(set(done.ran)), "something ran twice"
    assert done.scored == nodes(row.scores)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_runs_what_the_table_says(
    edit: str, life: Life, first: Path, tmp_path: Path, only_the_line: None
) -> None:
    root = copied(first, tmp_path)
    with life.edited():
        EDITS[edit](life)
        held(row(edit), by_command(life.settings(root)))
        assert inconsistent(life.settings(root)) == []
        if edit == "f is added to p (`on_new_model: join`)":
            assert {m: exported(root, m) for m in "abcuv"} == {m: exported(first, m) for m in "abcuv"}


@pytest.mark.parametrize("edit", BY_SENSOR)
def test_the_sensor_starts_the_same(edit: str, life: Life, first: Path, tmp_path: Path, only_the_line: None) -> None:
    root = copied(first, tmp_path)
    with life.edited():
        EDITS[edit](life)
        held(row(edit), by_sensor(life.settings(root)))
        assert inconsistent(life.settings(root)) == []


def exported(root: Path, model: str) -> dict[str, str]:
    """The deployed tensors of a model of p by name, each by a digest over its bytes as they lie in the files."""
    deployed = Artifacts(root).deployed("p")
    assert deployed is not None
    found = {}
    for file in sorted(deployed.parent.glob(f"{model}/*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    assert found
    return found


def test_the_page_has_this_table() -> None:
    lines = (CHECKOUT / "docs" / "rebuilds.md").read_text().splitlines()
    at = lines.index("| what changes | what runs | what is scored anew |")
    rows = [
        tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines[at + 2 : at + 2 + len(TABLE)]
    ]
    assert rows == [tuple(row) for row in TABLE]
    assert not lines[at + 2 + len(TABLE)].startswith("|")


def test_every_edit_is_in_the_table() -> None:
    assert [row.edit for row in TABLE] == [*EDITS, REGROUPED, VERSION, HOME_LOST, ROOT_LOST]


def test_a_new_version_of_a_stage_runs_that_stage(
    life: Life, first: Path, tmp_path: Path, only_the_line: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are kept, and what it gives again stops the wave."""
    root = copied(first, tmp_path)
    stage = STAGES["trajectory"]
    monkeypatch.setitem(STAGES, "trajectory", dataclasses.replace(stage, version=stage.version + 1))
    done = by_command(life.settings(root))
    held(row(VERSION), done)
    assert inconsistent(life.settings(root)) == []


def test_another_kind_of_device_profiles_everything_of_the_pool(life: Life, first: Path) -> None:
    """As far as the planner goes: there is no such device here. What the profiles change decides about the rest."""
    with life.edited():
        life.write("q", evaluation={"device": "cuda"})
        catalogue = load_catalogue(life.settings(first).pool_files())
        schedule = Planner(catalogue, life.settings(first).artifacts()).schedule()
    assert set(schedule.frontier) == nodes("profile: d, e")
    assert nodes("walk: q.d, q.e; sharing_proof: q") <= set(schedule.waiting)
    assert {key.partition(".")[0] for _, key in schedule.waiting} == {"q"}


def test_a_lost_history_of_runs_runs_nothing(life: Life, first: Path, tmp_path: Path) -> None:
    root = copied(first, tmp_path)
    shutil.rmtree(root / "dagster")
    done = by_command(life.settings(root))
    held(row(HOME_LOST), done)
    assert inconsistent(life.settings(root)) == []


def test_a_regrouping_of_what_is_as_it_would_be_formed_stops_there(
    life: Life, first: Path, tmp_path: Path, only_the_line: None
) -> None:
    held(row(REGROUPED), by_command(life.settings(copied(first, tmp_path)), regroup=True))


def test_a_regrouping_can_leave_averages_to_those_who_took_them(
    life: Life, first: Path, tmp_path: Path, only_the_line: None
) -> None:
    """Round after round, until everybody who makes a tensor takes it."""
    root = copied(first, tmp_path)
    with life.edited():
        life.write("p", grouping={"on_regroup": "accepted"})
        assert by_command(life.settings(root)).ran == ()  # before there is a regrouping it says nothing
        rounds = []
        while len(rounds) < 9:
            before, took = averages(root), taken(root)
            done = by_command(life.settings(root), regroup=True)
            after = averages(root)
            for place, makers in after.items():
                accepted = {m for m in before[place] if (m, place) in took}
                assert makers == (accepted if len(accepted) > 1 else before[place])
            assert inconsistent(life.settings(root)) == []
            if after == before:
                assert set(done.ran) == nodes("groups: p.narrow, p.wide, q.narrow")
                break
            rounds.append(done)
            searched = {key for stage, key in done.ran if stage == "trajectory"}
            assert searched and searched <= {f"p.{m}" for m in "abcuv"}
        assert 0 < len(rounds) < 9


def averages(root: Path) -> dict[str, set[str]]:
    """By tensor the models that make p's narrow averages."""
    record = Artifacts(root).load(Groups, "groups", "p.h32-bf16")
    return {g.members[0].tensor: {c.model for c in g.recipe.contributors} for g in record.groups}


def taken(root: Path) -> set[tuple[str, str]]:
    deployed = Artifacts(root).deployed("p")
    assert deployed is not None
    models = read_manifest(deployed.parent).models
    return {(m, name) for m, model in models.items() for name, t in model.tensors.items() if t.sharing == "merged"}
