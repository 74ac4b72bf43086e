"""The command line: exit statuses, one document on standard output, never a traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines import cli
from tests.conftest import CHECKOUT
from tests.pipelines.conftest import PoolWriter, line_alone, sandhi


def run(*arguments: object, cwd: Path = CHECKOUT) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("sandhi")), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["nonsense"],
        ["build", "pool.yaml", "--bogus"],
        ["check", "/nowhere.yaml"],
        ["report", "/nowhere.yaml"],
    ],
)
def test_wrong_use_is_status_2_and_one_line(arguments: list[str]) -> None:
    status, out, err = sandhi(*arguments)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_a_pool_with_a_mistake_is_status_2_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text("name: p\nmodels: []\nserch: {stride: 1}\n")
    status, out, err = sandhi("check", tmp_path / "pool.yaml", "--json")
    assert status == 2
    assert json.loads(out)["ok"] is False
    assert "pool.yaml:3" in err and "serch" in err


def test_a_root_that_is_no_path_is_status_2(tiny_pool: PoolWriter) -> None:
    status, _, err = sandhi("check", tiny_pool(["a", "b"]), "--root", "~nobody-of-this-name/x")
    assert status == 2 and "--root" in err


def test_check_reports_all_models_at_once(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool = tiny_pool(["a", "b", "c"])
    (tmp_path / "a" / "model.safetensors").unlink()
    (tmp_path / "b" / "config.json").write_text("{")
    status, out, err = sandhi("check", pool, "--root", tmp_path / "root", "--json")
    document = json.loads(out)
    assert status == 1, err
    assert not document["ok"]
    assert {p["model"] for p in document["problems"] if p["severity"] == "error"} == {"a", "b"}
    assert all(p["remedy"] and p["code"] for p in document["problems"])
    assert set(document["plan"]) == {
        "evaluations",
        "decompositions",
        "bytes_read",
        "bytes_written",
        "groups",
        "excluded",
    }
    status, out, err = sandhi("build", pool, "--root", tmp_path / "root", "--json")
    assert status == 1
    assert {p["model"] for p in json.loads(out)["problems"] if p["severity"] == "error"} == {"a", "b"}
    assert not (tmp_path / "root" / "exports").exists()


def test_a_sound_pool_checks_from_any_directory(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    tiny_pool(["a", "b"])
    done = run("check", "../tiny.yaml", "--root", "root", "--json", cwd=tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["evaluations"] > 0


def test_what_a_task_module_prints_is_not_in_the_document(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool = tiny_pool(["a", "b"])
    (tmp_path / "tasks" / "loud.py").write_text(
        "import os\nprint('HELLO')\nos.write(1, b'RAW')\ndef go(data):\n    print('HI')\n    return data\n"
    )
    with (tmp_path / "tasks" / "letters.yaml").open("a") as f:
        f.write("process_docs: !function loud.go\n")
    for options in (["--json"], []):
        done = run("check", pool, "--root", tmp_path / "root", *options)
        assert not options or json.loads(done.stdout)["ok"] is True
        assert "HELLO" in done.stderr and "RAW" in done.stderr and "HELLO" not in done.stdout


@pytest.mark.parametrize("target", ["| head -c 10", "> /dev/full"])
def test_an_answer_nobody_takes_is_no_traceback(target: str) -> None:
    command = f"{Path(sys.executable).with_name('sandhi')} schema {target}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_schema_is_a_json_schema() -> None:
    status, out, _ = sandhi("schema")
    assert status == 0
    assert json.loads(out)["properties"].keys() >= {"name", "models", "evaluation", "deploy"}


@pytest.mark.slow
@pytest.mark.parametrize("ending, after", [(signal.SIGINT, "profile"), (signal.SIGTERM, "merged_weights")])
def test_stopped_by_a_signal_says_so_and_goes_on_later(
    tiny_pool: PoolWriter, tmp_path: Path, ending: signal.Signals, after: str
) -> None:
    """The signal goes to the whole process group, as that of Ctrl-C does."""
    pool, root = tiny_pool(["a", "b"]), tmp_path / "root"
    command = [str(Path(sys.executable).with_name("sandhi")), "build", str(pool), "--root", str(root), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not list(root.glob(f"records/{after}/*.json")):
        time.sleep(0.05)
    time.sleep(1.0)  # into the next stage; the proof takes seconds
    os.killpg(process.pid, ending)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "error: stopped: " in err and "Traceback" not in err
    (problem,) = json.loads(out)["problems"]
    assert json.loads(out)["ok"] is False and problem["code"] == "stopped"
    with line_alone():
        status, _, err = sandhi("build", pool, "--root", root)
    assert status == 0, err


def test_nothing_is_written_beside_the_root(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool = tiny_pool(["a", "b"])
    before = sorted(p for p in tmp_path.rglob("*"))
    status, _, err = sandhi("check", pool, "--root", tmp_path / "root")
    assert status == 0, err
    assert sorted(p for p in tmp_path.rglob("*") if not p.is_relative_to(tmp_path / "root")) == before


def test_a_signal_that_comes_before_the_command_can_answer_is_answered() -> None:
    early = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'sandhi_core', 'check', 'nowhere.yaml', '--json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", early], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["problems"][0]["code"] == "stopped"


@pytest.mark.parametrize(
    "error, code, status",
    [
        (OSError(28, "No space left on device", "/srv/x"), "system", 1),
        (RuntimeError("of ours"), "defect", 1),
        (KeyboardInterrupt(), "stopped", 130),
    ],
)
def test_every_failure_is_one_document_and_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: str, status: int
) -> None:
    def fail(arguments: object, answer: object) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "build", replace(cli.COMMANDS["build"], run=fail))
    found, out, err = sandhi("build", "pool.yaml", "--json")
    assert found == status
    assert json.loads(out)["ok"] is False and [p["code"] for p in json.loads(out)["problems"]] == [code]
    assert len(err.splitlines()) == 1 and "Traceback" not in err
    assert sandhi("build", "pool.yaml")[:2] == (status, "")


def test_what_follows_two_dashes_is_for_engines() -> None:
    status, out, _ = sandhi("build", "pool.yaml", "--json", "--", "--enforce-eager")
    (problem,) = json.loads(out)["problems"]
    assert status == 2 and problem["remedy"] == "leave -- --enforce-eager ... out"


def test_wrong_use_is_a_document_too() -> None:
    status, out, _ = sandhi("build", "pool.yaml", "--json", "--bogus")
    assert status == 2 and json.loads(out)["problems"][0]["code"] == "usage"


def test_the_version_names_what_decides_bytes() -> None:
    status, out, err = sandhi("--version")
    assert (status, err) == (0, "")
    assert out.split()[:2] == ["sandhi", version("sandhi")]
    assert all(f"{name} {version(name)}" in out for name in ("torch", "transformers", "safetensors"))


def test_a_report_of_what_was_never_built_is_an_error(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool, root = tiny_pool(["a", "b"]), tmp_path / "elsewhere"
    status, out, err = sandhi("report", pool, "--root", root, "--json")
    document = json.loads(out)
    assert (status, document["ok"], document["reports"]) == (1, False, [])
    assert str(root) in err and f"sandhi build {pool}" in document["problems"][0]["remedy"]
    assert not root.exists()
    assert sandhi("report", pool, "--root", root)[:2] == (1, "")
