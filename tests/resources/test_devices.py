"""Several devices, one user each; and which runs are alive: both known by the kernel, whatever becomes of a process."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from resources.devices import device_slot
from resources.running import is_running, running
from sandhi_core.errors import UsageError
from tests.conftest import CHECKOUT

HOLD = """
import sys
from pathlib import Path
from resources.{module} import {name}
with {call} as held:
    print(held, flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(module: str, name: str, call: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process inside the `with` block of what is called, until it is killed; and what that gave it."""
    code = HOLD.format(module=module, name=name, call=call)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip(), child
        finally:
            child.kill()


def slot(folder: Path, names: tuple[str, ...], wanted: str) -> tuple[str, str, str]:
    return "devices", "device_slot", f"device_slot(Path({str(folder)!r}), {names!r}, {wanted!r})"


def test_without_devices_the_pool_file_decides(tmp_path: Path) -> None:
    with device_slot(tmp_path / "devices", (), "cuda:1") as device:
        assert device == "cuda:1"
    assert not (tmp_path / "devices").exists()


def test_each_device_has_one_user_and_a_killed_one_gives_it_back(tmp_path: Path) -> None:
    names = ("cuda:0", "cuda:1")
    with (
        process(*slot(tmp_path, names, "auto")) as (first, _),
        process(*slot(tmp_path, names, "cuda")) as (second, child),
    ):
        assert (first, second) == names
        child.send_signal(signal.SIGKILL)
        child.wait()
        with device_slot(tmp_path, names, "auto") as third:
            assert third == "cuda:1"


def test_a_device_that_is_named_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, slept = ("cuda:0", "cuda:1"), 0
    with ExitStack() as other:
        held, _ = other.enter_context(process(*slot(tmp_path, names, "cuda:1")))
        assert held == "cuda:1"

        def sleep(seconds: float) -> None:
            nonlocal slept
            slept += 1
            other.close()

        monkeypatch.setattr("resources.devices.time.sleep", sleep)
        with device_slot(tmp_path, names, "cuda:1") as device:
            assert device == "cuda:1"
    assert slept == 1


def test_slots_on_a_processor_are_as_many_as_are_named(tmp_path: Path) -> None:
    with device_slot(tmp_path, ("cpu", "cpu"), "cpu") as one, device_slot(tmp_path, ("cpu", "cpu"), "auto") as other:
        assert one == other == "cpu"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pool_that_no_device_serves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"evaluation[.]device is cpu, and SANDHI_DEVICES names cuda:0"):
        device_slot(tmp_path, ("cuda:0",), "cpu").__enter__()


@pytest.mark.parametrize(
    "end", [lambda child: child.kill(), lambda child: child.stdin.close()], ids=["killed", "ended"]
)
def test_a_run_is_alive_while_its_step_is(tmp_path: Path, end: Callable[[subprocess.Popen[str]], None]) -> None:
    assert not is_running(tmp_path, "run")
    with process("running", "running", f"running(Path({str(tmp_path)!r}), 'run')") as (_, child):
        assert is_running(tmp_path, "run") and not is_running(tmp_path, "another")
        end(child)
        child.wait()
        assert not is_running(tmp_path, "run")


def test_a_run_that_ended_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "run"):
        assert is_running(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []
