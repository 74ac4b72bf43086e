"""`sandhi gc` on a root that was really built: what goes, what stays, and that a build afterwards has nothing to do."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandhi_core.disk import verify_disk
from sandhi_core.layout import read_manifest
from tests.conftest import CHECKOUT
from tests.evaluation.local_tasks import choice_task
from tests.models import tiny_llama
from tests.pipelines.conftest import built, line_alone, sandhi

pytestmark = pytest.mark.slow

KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pipelines.collecting import collect
from pathlib import Path
real, left = os.unlink, 40
def unlink(*arguments, **named):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)
os.unlink = unlink
collect(Path(sys.argv[2]), Path(sys.argv[3]), keep=0, apply=True)
"""

SECTIONS: dict[str, Any] = {
    "profile": {"noise": False},
    "search": {"strategy": "ladder"},
    "merging": {"residuals": "low_rank"},
    "deploy": {"engine": "transformers"},
}


def write_pool(folder: Path, models: str) -> Path:
    for name in models:
        if not (folder / name).exists():
            tiny_llama(folder / name, seed=ord(name))
    task = {"task": "letters", "metric": "acc", "budget": 0.9}
    pool = {
        "name": "tiny",
        "models": [{"name": name, "path": name, "tasks": [task]} for name in models],
        "evaluation": {"include_path": "tasks", "dtype": "float32", "device": "cpu", "threads": 1},
    } | SECTIONS
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(pool))
    return path


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A pool that was built three times with other models, and its exports, oldest first."""
    folder = tmp_path_factory.mktemp("edited")
    choice_task(folder / "tasks")
    exports = []
    for models in ("abc", "abd", "ab"):
        with line_alone():
            document = built(write_pool(folder, models), folder / "root")
        exports.append(Path(document["pools"]["tiny"]["export"]))
    assert len(set(exports)) == 3
    return folder, exports


def gc(folder: Path, root: Path, *options: str) -> dict[str, Any]:
    status, out, err = sandhi("gc", folder / "tiny.yaml", "--root", root, "--json", *options)
    assert status == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def names(document: dict[str, Any], *kinds: str) -> set[str]:
    return {Path(r["path"]).name for r in document["removals"] if r["kind"] in kinds}


def tree(root: Path) -> dict[str, bytes]:
    """Every file but Dagster's own and locks."""
    files = (p for p in root.rglob("*") if p.is_file())
    found = {p.relative_to(root): p.read_bytes() for p in files}
    return {p.as_posix(): data for p, data in found.items() if p.parts[0] not in ("dagster", "lock", "use")}


def occupied(root: Path) -> int:
    """Bytes that its files take on the disk, each once."""
    states = (p.lstat() for p in root.rglob("*") if p.is_file())
    return sum({(s.st_dev, s.st_ino): 512 * s.st_blocks for s in states}.values())


def sound(export: Path) -> bool:
    return not verify_disk(export, read_manifest(export)).problems


def test_a_dry_run_changes_nothing_and_tells_what_would_go(edited: tuple[Path, list[Path]]) -> None:
    folder, (first, second, third) = edited
    before = tree(folder / "root")
    told = gc(folder, folder / "root")
    assert tree(folder / "root") == before and not told["applied"]
    assert names(told, "export") == {first.name}
    assert {Path(k["path"]): k["why"] for k in told["kept"]} == {third: "deployed", second: "to go back to"}
    assert names(told, "record") >= {"tiny.c.json", "tiny.d.json", "c.json", "d.json"}
    assert {r["kind"] for r in told["removals"]} >= {"export", "record", "inputs", "spectrum", "recipe", "tensor"}
    status, out, _ = sandhi("gc", folder, "--root", folder / "root")
    assert status == 0 and "What `--apply` would remove" in out and str(first) in out


def test_killed_or_not_it_leaves_what_builds_and_verifies_and_who_comes_back_costs_others_nothing(
    edited: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    folder, exports = edited
    root, other = tmp_path / "root", tmp_path / "other"
    for copy in (root, other):
        subprocess.run(["cp", "-a", folder / "root", copy], check=True)
    first, second, third = (root / path.relative_to(folder / "root") for path in exports)
    current = tree(third)

    run = [sys.executable, "-c", KILLED, str(CHECKOUT), str(folder / "tiny.yaml"), str(root)]
    killed = subprocess.run(run, cwd=CHECKOUT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sound(third) and not (second.exists() and first.exists())
    assert built(folder / "tiny.yaml", root)["ran"] == []

    before = occupied(root) - occupied(root / "dagster")
    done = gc(folder, root, "--keep", "0", "--apply")
    assert done["applied"] and done["freed"] == before - (occupied(root) - occupied(root / "dagster"))
    assert [p.name for p in third.parent.iterdir() if p.name[0] != "."] == [third.name]
    again = built(folder / "tiny.yaml", root)
    assert again["ran"] == [] and tree(third) == current
    assert gc(folder, root, "--keep", "0")["removals"] == []
    assert tree(other) == tree(folder / "root")  # another root is another root

    back = built(write_pool(folder, "abc"), root)
    write_pool(folder, "ab")
    assert {m: n for m, n in back["evaluations"].items() if m in "ab"} == {"a": 0, "b": 0}
    assert sound(Path(back["pools"]["tiny"]["export"]))


def test_what_a_process_maps_stays_until_it_ends(edited: tuple[Path, list[Path]], tmp_path: Path) -> None:
    folder, exports = edited
    root = tmp_path / "root"
    subprocess.run(["cp", "-a", folder / "root", root], check=True)
    first = root / exports[0].relative_to(folder / "root")
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    weights = first / "a" / "private.sandhi"
    shutil.copy(weights, tmp_path / "same")
    with subprocess.Popen(
        [sys.executable, "-c", code, weights.name],
        cwd=weights.parent,  # so that no command names the export
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        told = gc(folder, root, "--keep", "0", "--apply")
        server.kill()
    assert {k["why"] for k in told["kept"]} == {"deployed", f"mapped by process {server.pid}"}
    assert sound(first) and weights.read_bytes() == (tmp_path / "same").read_bytes()
    assert names(gc(folder, root, "--keep", "0", "--apply"), "export") == {first.name}


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["empty"], 2, "holds no pool file"),
        (["tiny.yaml", "--keep", "-1"], 2, "is no number of exports"),
        (["tiny.yaml", "--root", "empty"], 1, "nothing was built in this artifact root"),
        (["bad"], 2, "bad.yaml:1"),
    ],
)
def test_wrong_use_removes_nothing(
    edited: tuple[Path, list[Path]], arguments: list[str], status: int, told: str
) -> None:
    folder, _ = edited
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "bad").mkdir(exist_ok=True)
    (folder / "bad" / "bad.yaml").write_text("nonsense: 1\n")
    before = tree(folder / "root")
    options = [] if "--root" in arguments else ["--root", str(folder / "root")]
    given = [str(folder / a) if (folder / a).exists() else a for a in arguments]
    found, _, err = sandhi("gc", *given, *options, "--apply")
    assert found == status and told in err
    assert tree(folder / "root") == before


def test_with_a_record_that_is_damaged_nothing_goes_until_a_build_has_made_it_again_and_a_root_may_move(
    edited: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    folder, _ = edited
    root = tmp_path / "root"
    subprocess.run(["cp", "-a", folder / "root", root], check=True)
    (root / "records" / "deployment" / "tiny.json").write_text("{")
    before = tree(root)
    status, _, err = sandhi("gc", folder / "tiny.yaml", "--root", root, "--keep", "0", "--apply")
    assert status == 1 and "records/deployment/tiny.json" in err and "nothing is removed" in err
    assert before.items() <= tree(root).items()
    assert built(folder / "tiny.yaml", root)["ran"] == [["deployment", "tiny"]]
    assert gc(folder, root, "--keep", "0", "--apply")["applied"]
    moved = root.rename(tmp_path / "moved")
    again = built(folder / "tiny.yaml", moved)
    assert again["ran"] == [["deployment", "tiny"]]
    export = Path(again["pools"]["tiny"]["export"])
    assert export.is_relative_to(moved) and json.loads((export / "deployment.json").read_bytes())["export"] == str(
        export
    )


def test_pools_that_are_said_to_be_gone_are_named_and_a_file_of_either_ending_is_a_pool_file(
    edited: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    folder, exports = edited
    pool = yaml.safe_load((folder / "tiny.yaml").read_text())
    pool["evaluation"]["include_path"] = str(folder / "tasks")
    for model in pool["models"]:
        model["path"] = str(folder / model["name"])
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(pool))
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(pool | {"name": "other"}))

    def told() -> dict[str, Any]:
        status, out, err = sandhi("gc", tmp_path, "--root", folder / "root", "--gone", "--keep", "2", "--json")
        assert status == 0, err
        document: dict[str, Any] = json.loads(out)
        return document

    assert not names(told(), "export") and "gone-pools" not in {problem["code"] for problem in told()["problems"]}
    (tmp_path / "team").mkdir()
    (tmp_path / "tiny.yml").rename(tmp_path / "team" / "tiny.yml")
    gone = told()
    assert names(gone, "export") == {path.name for path in exports}
    (message,) = [problem["message"] for problem in gone["problems"] if problem["code"] == "gone-pools"]
    assert "no given file defines tiny" in message
