"""What a build may touch, whom it believes, and who may change what it wrote (docs/security.md)."""

import ast
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import PoolError
from sandhi_core.export import export_pool
from sandhi_core.pools.pool import ModelEntry, TaskBudget, load_pool
from sandhi_core.preflight.checks import check_model
from sandhi_core.store import Store
from tests.evaluation.local_tasks import choice_task
from tests.models import INDEX, WEIGHTS, tiny_llama

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(f for part in ("sandhi_core", "resources", "assets", "pipelines") for f in (ROOT / part).rglob("*.py"))
HOSTILE = ["a b", "it's", 'say "x"', "$(touch owned)", "`touch owned`", "a;touch owned", "-rf", "naïve ü 模型", "a&b|c"]

# Run in the child before anything else: notes every path that Python opens to write, makes, renames or removes.
WATCH = """
import os, sys
notes, busy = os.open(os.environ["WATCH_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), []
EVENTS = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0,
          "os.chmod": 0, "sqlite3.connect": 0}
def note(event, args):
    if busy or (event in ("os.remove", "os.rmdir") and args[1] != -1):  # a name in a folder that is open
        return
    busy.append(1)
    try:
        if event == "open" and isinstance(args[0], (str, bytes)) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            path = args[0]
        elif event in EVENTS and isinstance(args[EVENTS[event]], (str, bytes, os.PathLike)):
            path = args[EVENTS[event]]
        else:
            return
        os.write(notes, os.path.abspath(os.fsdecode(path)).encode() + b"\\n")
    finally:
        busy.pop()
sys.addaudithook(note)
"""


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in found}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_build_writes_below_the_artifact_root_and_nowhere_else(tmp_path: Path) -> None:
    """Home, temporary files, working directory, pool and checkpoints stay as they are, at every moment as far as Python
    sees it, and at the end as far as the disk does."""
    pool = tmp_path / "pool"
    choice_task(pool / "tasks")
    for seed, name in enumerate("ab"):
        tiny_llama(pool / name, seed)
    task = {"task": "letters", "metric": "acc", "budget": 0.9}
    document = {
        "name": "p",
        "models": [{"name": n, "path": n, "tasks": [task]} for n in "ab"],
        "evaluation": {"include_path": "tasks", "device": "cpu", "threads": 1},
        "profile": {"noise": False},
        "search": {"strategy": "ladder"},
    }
    (pool / "pool.yaml").write_text(yaml.safe_dump(document))
    places = {name: tmp_path / name for name in ("home", "tmp", "cwd", "watch")}
    for place in places.values():
        place.mkdir()
    (places["watch"] / "sitecustomize.py").write_text(WATCH)
    notes, before = tmp_path / "notes", listing(pool)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(places["home"]),
        "TMPDIR": str(places["tmp"]),
        "PYTHONPATH": f"{places['watch']}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "WATCH_NOTES": str(notes),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "sandhi_core", "build", str(pool / "pool.yaml"), "--root", str(tmp_path / "root")]
    done = subprocess.run(command, cwd=places["cwd"], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert listing(pool) == before
    assert [p for name in ("home", "tmp", "cwd") for p in places[name].iterdir()] == []
    touched = {Path(line) for line in notes.read_text().splitlines()}
    inside = {path for path in touched if path.is_relative_to(tmp_path / "root")}
    assert len(inside) > 100  # the watch sees
    allowed = {Path("/dev/null"), Path("/dev/tty")}
    assert {p for p in touched - inside - allowed if not p.is_relative_to("/proc")} == set()


def test_no_source_builds_shell_strings_unpickles_or_runs_a_models_code() -> None:
    """Whatever names a call could have for it."""
    forbidden = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell", "eval_", "exec_"}
    wrong = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} | ({node.module} if isinstance(node, ast.ImportFrom) else set())
                if names & {"pickle", "dill", "marshal", "shelve", "joblib"}:
                    wrong.append((file.name, node.lineno, "pickle"))
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = node.func.value.id if isinstance(getattr(node.func, "value", None), ast.Name) else ""  # type: ignore[attr-defined]
            given = {k.arg: k.value for k in node.keywords}
            shell, remote = given.get("shell"), given.get("trust_remote_code")
            if called in forbidden or (isinstance(node.func, ast.Name) and called in ("eval", "exec", "__import__")):
                wrong.append((file.name, node.lineno, called))
            if owner == "subprocess" and shell is not None:
                wrong.append((file.name, node.lineno, "shell"))
            if remote is not None and not (isinstance(remote, ast.Constant) and remote.value is False):
                wrong.append((file.name, node.lineno, "trust_remote_code"))
            if (owner, called) == ("torch", "load"):
                wrong.append((file.name, node.lineno, "torch.load"))
            if (owner, called) == ("yaml", "load") and getattr(given.get("Loader"), "id", "") != "_Loader":
                wrong.append((file.name, node.lineno, "yaml.load"))
            if called == "from_pretrained" and owner.startswith("Auto") and "trust_remote_code" not in given:
                wrong.append((file.name, node.lineno, "from_pretrained"))
    assert wrong == []


# --- names and paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*HOSTILE, "a\nb", "../up", "a/b", "", "."])
def test_a_models_name_is_a_slug_or_refused(tmp_path: Path, name: str) -> None:
    task = {"task": "t", "metric": "acc", "budget": 0.1}
    document = {"name": "p", "models": [{"name": name, "path": "org/m", "tasks": [task]}]}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(document, allow_unicode=True))
    with pytest.raises(PoolError, match=r"models\[0\]\.name"):
        load_pool(tmp_path / "pool.yaml")


@pytest.mark.parametrize("name", HOSTILE)
def test_paths_with_odd_names_are_paths(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read, exported and rendered as they stand; nothing in them is run."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    tiny_llama(folder / name)
    task = {"task": "t", "metric": "acc", "budget": 0.1}
    document = {"name": "p", "models": [{"name": "m", "path": f"./{name}", "tasks": [task]}]}
    (folder / "pool.yaml").write_text(yaml.safe_dump(document, allow_unicode=True))
    pool = load_pool(folder / "pool.yaml")
    problems, found = check_model(pool.models[0], folder / "scans")
    assert (problems, found is None) == ([], False)
    checkpoint = Checkpoint.open(folder / name, "m")
    (folder / "exports").mkdir()
    merged = export_pool(
        pool,
        "none",
        {"m": checkpoint},
        {"m": fingerprint(checkpoint, folder / "scans")},
        {},
        {"m": "w"},
        Store(folder / "store"),
        folder / "exports",
    )
    export = folder / merged.export
    assert (export / "m" / "config.json").read_bytes() == (folder / name / "config.json").read_bytes()
    assert [p.name for p in tmp_path.rglob("owned")] == []
    said = shlex.join(["vllm", "serve", str(export / "m")])
    words = json.loads(
        subprocess.run(
            [
                "/bin/sh",
                "-c",
                f"set -- {said}; printf '%s' \"$3\" | {shlex.quote(sys.executable)} -c "
                "'import json,sys; print(json.dumps(sys.stdin.read()))'",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert words == str(export / "m")


# --- links --------------------------------------------------------------------------------------------------


def test_weights_behind_links_out_of_a_checkpoint_are_read_and_reported(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    (tmp_path / "elsewhere").mkdir()
    for file in (WEIGHTS, "tokenizer.json"):
        (directory / file).rename(tmp_path / "elsewhere" / file)
        (directory / file).symlink_to(tmp_path / "elsewhere" / file)
    problems, found = check_model(model_entry(directory), tmp_path / "scans")
    assert found is not None
    assert [(p.code, p.severity, p.file) for p in problems] == [
        ("link-outside", "warning", str(directory / WEIGHTS)),
    ]
    assert "2 files" in problems[0].message and str(tmp_path / "elsewhere") in problems[0].message


def test_the_hub_caches_own_links_are_no_news(tmp_path: Path) -> None:
    """snapshots/REVISION/FILE leads to blobs/DIGEST of the same repository."""
    snapshot = tiny_llama(tmp_path / "models--org--m" / "snapshots" / "abc")
    (tmp_path / "models--org--m" / "blobs").mkdir()
    for n, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(tmp_path / "models--org--m" / "blobs" / f"{n:064}")
        file.symlink_to(f"../../blobs/{n:064}")
    problems, found = check_model(model_entry(snapshot), tmp_path / "scans")
    assert (problems, found is None) == ([], False)


def model_entry(directory: Path) -> ModelEntry:
    return ModelEntry(name="m", path=str(directory), tasks=(TaskBudget(task="t", metric="acc", budget=0.1),))


# --- a store that several people use ------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o000])
def test_what_is_written_is_nobodys_to_change(tmp_path: Path, mask: int) -> None:
    """Files of the store and of exports can be read by all and written by none, directories written by their owner at
    most as the umask says."""
    checkpoint = Checkpoint.open(tiny_llama(tmp_path / "m"), "m")
    task = {"task": "t", "metric": "acc", "budget": 0.1}
    document = {"name": "p", "models": [{"name": n, "path": "m", "tasks": [task]} for n in "ab"]}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(document))
    before = os.umask(mask)
    try:
        (tmp_path / "root" / "exports").mkdir(parents=True)
        opened = {n: Checkpoint.open(checkpoint.directory, n) for n in "ab"}
        export_pool(
            load_pool(tmp_path / "pool.yaml"),
            "none",
            opened,
            {n: fingerprint(c, tmp_path / "root" / "scans") for n, c in opened.items()},
            {},
            {"a": "w", "b": "w"},
            Store(tmp_path / "root" / "store"),
            tmp_path / "root" / "exports",
        )
    finally:
        os.umask(before)
    files = [p for part in ("store", "exports") for p in (tmp_path / "root" / part).rglob("*") if p.is_file()]
    weights = [p for p in files if p.suffix == ".safetensors"]
    assert len(weights) > 4
    kept = [p for p in files if not p.name.endswith(".lock")]
    assert {stat.S_IMODE(p.stat().st_mode) for p in kept} == {0o444}
    folders = [p for p in (tmp_path / "root").rglob("*") if p.is_dir()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in folders} == {0o777 & ~mask}
    assert (tmp_path / "root" / "exports").exists() and INDEX in {p.name for p in files}


def test_every_test_that_the_security_page_names_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    files = {name: ROOT / name for name in re.findall(r"`(tests/[\w/]+\.py)", page)}
    assert len(files) > 5 and all(file.is_file() for file in files.values())
    own = Path(__file__).read_text()
    tests = re.findall(r"::(test_\w+)", page)
    assert len(tests) > 5 and all(f"def {test}(" in own for test in tests)
