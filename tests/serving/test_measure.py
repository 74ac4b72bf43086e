"""Real servers of tiny models, looked at from outside; nothing of them outlives whoever measures."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sandhi_core.checkpoints.safetensors_file import PAGE, map_file
from sandhi_core.errors import CheckpointError, ProofError, SandhiError, ServingError, UsageError
from sandhi_core.memory import WeightFiles, weight_files, weights_in
from sandhi_core.records import ProcessMemory
from sandhi_core.serving import engines
from sandhi_core.serving import measure as measuring
from sandhi_core.serving.completions import complete
from sandhi_core.serving.engines import PYTHON, environment, python_of
from sandhi_core.serving.keeper import descendants
from sandhi_core.serving.measure import NEW_TOKENS, REQUESTS, hold
from sandhi_core.serving.processes import Server
from sandhi_core.serving.together import Served, _name, serving
from tests.measured import measure
from tests.models import WEIGHTS, edit_json, tiny_llama
from tests.processes import left
from tests.serving import standin

SIZE = {"hidden_size": 64, "intermediate_size": 256, "dtype": torch.float32, "tokenizer": False}
ROOT = Path(measuring.__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, ProcessMemory]]]:
    """Two names of one file, a file alone, one loaded as another dtype; this process maps the first too."""
    root = tmp_path_factory.mktemp("memory")
    first = tiny_llama(root / "first", **SIZE)
    second, alone, cast = (
        root / "second",
        tiny_llama(root / "alone", 1, **SIZE),
        tiny_llama(root / "cast", 2, **SIZE),
    )
    second.mkdir()
    for file in first.iterdir():
        (second / file.name).hardlink_to(file)
    edit_json(cast / "config.json", dtype="bfloat16")
    mapped = map_file(first / WEIGHTS)
    for entry in mapped.values():
        bytes(entry.raw)
    found = measure({d.name: d for d in (first, second, alone, cast)})
    yield sum(e.raw.nbytes for e in mapped.values()), {p.model: p for p in found}


def test_two_names_of_one_file_cost_half_each(measured: tuple[int, dict[str, ProcessMemory]]) -> None:
    nbytes, by_model = measured
    first, second = by_model["first"], by_model["second"]
    assert first.rss == second.rss and nbytes <= first.rss <= nbytes + 2 * PAGE
    assert abs(first.pss + second.pss - first.rss) <= 2
    assert abs(first.pss - second.pss) <= 2
    assert first.unmapped == second.unmapped == 0


def test_a_file_alone_costs_all_of_it(measured: tuple[int, dict[str, ProcessMemory]]) -> None:
    nbytes, by_model = measured
    alone = by_model["alone"]
    assert alone.pss == alone.rss and nbytes <= alone.pss <= nbytes + 2 * PAGE
    assert alone.unmapped == 0


def test_private_copies_count_as_unmapped(measured: tuple[int, dict[str, ProcessMemory]]) -> None:
    nbytes, by_model = measured
    assert by_model["cast"].unmapped == nbytes // 2
    assert by_model["cast"].pss == 0


def test_members_answer_while_they_are_looked_at(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", **SIZE)
    held = hold({"a": directory, "b": directory})
    assert held.engine.startswith("transformers ") and "CPU" in held.engine
    assert [holder.model for holder in held.holders] == ["a", "b"]
    assert len({holder.pid for holder in held.holders}) == 2 and all(h.whole > h.rss for h in held.holders)
    assert held.completions["a"] == held.completions["b"]
    assert [c.tokens[: c.prompted] for c in held.completions["a"]] == list(REQUESTS)
    assert {len(c.chosen) for c in held.completions["a"]} == {NEW_TOKENS}
    assert held.seconds.keys() == {"a", "b"}
    assert weights_in(directory) == {"F32": sum(e.raw.nbytes for e in map_file(directory / WEIGHTS).values())}


def test_files_are_looked_up_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, ...]] = []

    def counted(*directories: Path) -> WeightFiles:
        asked.append(directories)
        return weight_files(*directories)

    monkeypatch.setattr(measuring, "weight_files", counted)
    directory = tiny_llama(tmp_path / "m", **SIZE)
    held = hold({"a": directory, "b": directory})
    assert asked == [(directory, directory)] and all(holder.rss for holder in held.holders)


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", max_position_embeddings=16, **SIZE)
    with pytest.raises(ServingError, match=r"model a.*a prompt of 9 tokens leaves no room for 8 of 16"):
        hold({"a": directory}, prompts={"a": [[1] * 9]})


def test_a_server_that_died_meanwhile_saves_nothing(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", **SIZE)
    with serving("transformers", {"a": directory, "b": directory}) as (first, second):
        os.kill(second.pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while Path(f"/proc/{second.pids[0]}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{second.pids[0]}").exists()  # its parent has waited for it
        assert first.holders(weight_files(directory))[0].rss > 0
        with pytest.raises(ServingError, match=r"model b.*a process of its server has ended"):
            second.holders(weight_files(directory))


# --- what is wrong ------------------------------------------------------------------------------------------


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def test_a_directory_that_cannot_be_loaded_is_named(tmp_path: Path, leftovers: Path) -> None:
    good, bad = tiny_llama(tmp_path / "good", **SIZE), tiny_llama(tmp_path / "bad", **SIZE)
    (bad / WEIGHTS).unlink()
    with pytest.raises(ServingError, match=r"model bad.*transformers cannot load the model: OSError") as failed:
        measure({"good": good, "bad": bad})
    assert not left()
    (log,) = leftovers.glob("*/*")  # to be read
    assert log.name == "hold.log" and failed.value.problem.file == str(bad)
    assert failed.value.problem.remedy.endswith(f"; the servers' logs are in {log.parent}")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ServingError("m", remedy="r", model="a", tensor="t", code="not-held"), "model a file {logs} tensor t: m (r)"),
        (ServingError("m", remedy="r", file="{logs}/a.log"), "file {logs}/a.log: m (r)"),
        (CheckpointError("m", remedy="r", file="/f"), "file /f: m (r; the servers' logs are in {logs})"),
    ],
)
def test_an_error_names_the_logs_and_stays_what_it_is(error: SandhiError, told: str) -> None:
    logs = Path("{logs}")
    _name(logs, error)
    code = "not-held" if error.problem.tensor else error.code
    assert str(error) == error.problems[0].line() == f"error: {code}: {told}"


def test_time_is_bounded(tmp_path: Path, leftovers: Path) -> None:
    with pytest.raises(ServingError, match=r"model a, b.*was not ready within 0"):
        measure({"b": tmp_path, "a": tmp_path}, timeout=0.05)
    assert not left()


def test_processes_that_end_early_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sandhi_core.serving.together.python_of", lambda engine, given="": "/bin/false")
    with pytest.raises(ServingError, match="its server ended with status 1"):
        measure({"a": tmp_path})


def test_whatever_fails_while_servers_run_leaves_the_log_and_names_it(tmp_path: Path, leftovers: Path) -> None:
    directory = tiny_llama(tmp_path / "m", **SIZE)
    said = r"model a file .*sandhi-serving-.*: its server gives no answer"
    with pytest.raises(ServingError, match=said) as failed, serving("transformers", {"a": directory}) as (server,):
        os.kill(server.pids[0], signal.SIGKILL)
        complete(server.url, "a", [1, 2], 1, timeout=30)
    assert failed.value.problem.file is not None and (Path(failed.value.problem.file) / "hold.log").is_file()
    with pytest.raises(ZeroDivisionError) as defect, serving("transformers", {"a": directory}):
        _ = 1 // 0
    assert "sandhi-serving-" in defect.value.__notes__[0]
    assert len(list(leftovers.glob("*/hold.log"))) == 2
    with pytest.raises(KeyboardInterrupt), serving("transformers", {"a": directory}):
        raise KeyboardInterrupt
    assert len(list(leftovers.glob("*"))) == 2 and not left()


def test_servers_are_stopped_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(standin.install(tmp_path / "engine")))
    monkeypatch.setattr("sandhi_core.serving.together._answering", lambda model, *_: Served(model, *[None] * 6))  # type: ignore[arg-type]
    done: list[tuple[str, str]] = []

    def noted(name: str) -> None:
        real = getattr(Server, name)
        monkeypatch.setattr(Server, name, lambda self: (done.append((name, self.name)), real(self))[1])

    noted("ask")
    noted("stop")
    directory = tiny_llama(tmp_path / "m", **SIZE)
    with serving("vllm", {"a": directory, "b": directory}, sys.executable, plugin=False):
        assert len(left()) >= 4  # keepers and servers
    assert done[:3] == [("ask", "a"), ("ask", "b"), ("stop", "a")]
    assert not left()


@pytest.mark.parametrize("plugin", [True, False])
def test_vllm_is_not_started_for_what_it_cannot_serve(tmp_path: Path, leftovers: Path, plugin: bool) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"model a file .*none: holds no weights"):
        hold({"a": tmp_path / "none"}, "vllm", sys.executable, plugin=plugin)
    double = tiny_llama(tmp_path / "double", **SIZE | {"dtype": torch.float64})
    with pytest.raises(ProofError, match=r"model a: vLLM does not serve weights in F64"):
        hold({"a": double}, "vllm", sys.executable, plugin=plugin)
    assert not list(leftovers.iterdir())


def test_what_is_sound_leaves_no_log(tmp_path: Path, leftovers: Path) -> None:
    measure({"a": tiny_llama(tmp_path / "m", **SIZE)})
    assert not list(leftovers.iterdir()) and not left()


MEASURER = """
    import os, sys
    from pathlib import Path
    from sandhi_core.serving import measure as measuring
    from sandhi_core.serving.completions import complete
    def slowly(*words, **options):
        print("asking", flush=True)
        found = complete(*words, **options)
        __import__("time").sleep(60)
        return found
    measuring.complete = slowly
    print("starting", flush=True)
    measuring.hold({name: Path(sys.argv[1]) for name in "ab"}, sys.argv[2], sys.argv[3])
"""


def measurer(directory: Path, engine: str, python: str, logs: Path) -> "subprocess.Popen[str]":
    """Whoever measures; logs, which SIGKILL leaves behind, go to `logs`."""
    command = [sys.executable, "-c", textwrap.dedent(MEASURER), str(directory), engine, python]
    settings = os.environ | {"TMPDIR": str(logs)}
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdout=pipe, stderr=none, text=True, cwd=ROOT, env=settings)


def ends_all(process: "subprocess.Popen[str]", how: signal.Signals, seconds: float = 60) -> list[int]:
    """Signal whoever measures; returns which of everything that it had started is left after it has ended."""
    started = {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19] for pid in descendants(process.pid)
    }
    assert started
    process.send_signal(how)
    process.wait(seconds)
    deadline = time.monotonic() + seconds
    while (left := [pid for pid, born in started.items() if lives(pid, born)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def lives(pid: int, born: str) -> bool:
    """Whether that very process (pids are used again) has not ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state not in "ZX" and rest[18] == born


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("starting", signal.SIGINT),
        ("starting", signal.SIGKILL),
        ("loading", signal.SIGTERM),
        ("asking", signal.SIGTERM),
        ("asking", signal.SIGKILL),
    ],
)
def test_nothing_outlives_who_measures(tmp_path: Path, moment: str, how: signal.Signals) -> None:
    with measurer(tiny_llama(tmp_path / "m", **SIZE), "transformers", "", tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        if moment == "asking":
            assert process.stdout.readline() == "asking\n"
        least = {"starting": 1, "loading": 2, "asking": 4}[moment]  # the keeper; who forks; two that answer
        deadline = time.monotonic() + 120
        while len(descendants(process.pid)) < least and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ends_all(process, how) == []


# --- which engine -------------------------------------------------------------------------------------------


def test_where_vllm_lies_is_a_matter_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    assert python_of("transformers") == sys.executable
    assert python_of("vllm", sys.executable) == sys.executable
    with pytest.raises(UsageError, match=f"no vLLM beside this Python.*--python or {PYTHON}"):
        python_of("vllm")
    with pytest.raises(UsageError, match="'/nowhere' is no program"):
        python_of("vllm", "/nowhere")
    monkeypatch.setenv(PYTHON, sys.executable)
    assert python_of("vllm") == sys.executable


def test_only_a_checkout_comes_before_what_an_engine_has_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert environment()["PYTHONPATH"] == str(ROOT)
    monkeypatch.setattr(engines, "_PACKAGE", tmp_path)  # like site-packages
    assert "PYTHONPATH" not in environment()
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert "PYTHONPATH" not in environment()  # what this process has is handed on as it is
