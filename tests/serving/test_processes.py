"""Real servers, real signals: what is started is ended, whatever happens to whoever started it."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sandhi_core.deploy import vllm
from sandhi_core.errors import ServingError
from sandhi_core.serving.processes import Server, last_lines, transformers_command

HEALTHY = """
    import os, signal, subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(os.getcwd().encode())
        def log_message(self, *arguments): pass
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer)
"""
SERVE = "\n    print('listening', flush=True)\n    server.serve_forever()"
STUBBORN = "\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)"
CHILD = "[sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)']"
WITH_CHILDREN = f"\n    subprocess.Popen({CHILD})\n    subprocess.Popen({CHILD}, start_new_session=True)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(body: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(body), *map(str, arguments)]


def started(tmp_path: Path, body: str, grace: float = 5.0, **options: object) -> Server:
    port = free_port()
    log = tmp_path / "log"
    return Server.start("chemist", program(body, port), port=port, log=log, grace=grace, **options)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone_within(pids: "list[int] | tuple[int, ...]", seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


def wait_for(server: Server, count: int) -> tuple[int, ...]:
    """The server's processes, once there are so many."""
    deadline = time.monotonic() + 10
    while len(pids := server.pids()) < count:
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    return pids


@contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


# --- one server ---------------------------------------------------------------------------------------------


def test_a_server_is_started_answers_and_is_gone(tmp_path: Path) -> None:
    with started(tmp_path, HEALTHY + SERVE, directory=tmp_path) as server:
        assert 0 < server.wait_ready(30) < 30
        with urllib.request.urlopen(server.url + "/health") as answer:
            assert answer.read() == os.fsencode(tmp_path.resolve())
        pids = server.pids()
        assert len(pids) == 1 and alive(pids[0]) and server.status() is None
    assert not any(map(alive, pids))
    assert server.pids() == () and server.status() == 128 + signal.SIGTERM
    assert last_lines(server.log) == ["listening"]


def test_pythons_own_server_too(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with Server.start("files", command, port=port, log=tmp_path / "log", health="/", directory=tmp_path) as server:
        server.wait_ready(30)
        server.stop()
        server.stop()  # a second time is none
        assert server.status() is not None


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, HEALTHY + STUBBORN + SERVE, grace=0.3) as server:
        server.wait_ready(30)
        pids, began = server.pids(), time.monotonic()
    assert time.monotonic() - began < 5
    assert server.status() == 128 + signal.SIGKILL and not any(map(alive, pids))


def test_its_children_go_too_even_in_sessions_of_their_own(tmp_path: Path) -> None:
    with started(tmp_path, HEALTHY + WITH_CHILDREN + SERVE, grace=0.5) as server:
        server.wait_ready(30)
        pids = wait_for(server, 3)
    assert not any(map(alive, pids))


def test_children_of_a_server_that_ended_by_itself_do_not_stay(tmp_path: Path) -> None:
    with started(tmp_path, HEALTHY + WITH_CHILDREN + "\n    sys.stdin.read(); import time; time.sleep(1)") as server:
        pids = wait_for(server, 3)
        assert gone_within(pids, 10)
        server.stop()
        assert server.status() == 0


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_a_server_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    body = "import sys\nfor i in range(40): print('line', i)\nsys.exit('no such model')"
    with started(tmp_path, body) as server, pytest.raises(ServingError) as raised:
        server.wait_ready(30)
    problem = raised.value.problem
    assert (problem.code, problem.model, problem.file) == ("serving", "chemist", str(tmp_path / "log"))
    assert "with status 1" in problem.message and problem.message.endswith("  no such model\n")
    assert "line 39" in problem.message and "line 20" not in problem.message


def test_one_that_was_killed_says_by_what(tmp_path: Path) -> None:
    body = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with started(tmp_path, body) as server, pytest.raises(ServingError, match="by signal SIGKILL; its log is empty"):
        server.wait_ready(30)


@pytest.mark.parametrize("status", [255, 193, 128])  # there are 64 signals
def test_a_status_that_is_no_signal_is_told_as_it_is(tmp_path: Path, status: int) -> None:
    said = f"with status {status}; its log is empty"
    with started(tmp_path, f"import os; os._exit({status})") as server, pytest.raises(ServingError, match=said):
        server.wait_ready(30)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    port = free_port()
    with (
        Server.start("chemist", ["/no/python3"], port=port, log=tmp_path / "log") as server,
        pytest.raises(ServingError, match="/no/python3: No such file or directory"),
    ):
        server.wait_ready(30)


def test_one_that_never_answers_ends_with_its_time(tmp_path: Path) -> None:
    with started(tmp_path, "import time; print('loading', flush=True); time.sleep(600)") as server:
        pids = wait_for(server, 1)
        with pytest.raises(ServingError, match=r"was not ready within 1 seconds; its log ends:\n  loading"):
            server.wait_ready(1)
    assert not any(map(alive, pids))


def test_one_that_answers_something_else_is_not_ready(tmp_path: Path) -> None:
    with (
        started(tmp_path, HEALTHY + SERVE, health="/elsewhere") as server,
        pytest.raises(ServingError, match="was not ready within 1"),
    ):
        server.wait_ready(1)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with listening() as port, pytest.raises(ServingError, match=rf"port {port} of 127.0.0.1 is in use.*other ports"):
        Server.start("chemist", program(HEALTHY + SERVE, port), port=port, log=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        Server.start("chemist", ["true"], port=8000, host="192.0.2.1", log=tmp_path / "log")


# --- whoever started it goes --------------------------------------------------------------------------------

PARENT = """
    import sys, time
    from pathlib import Path
    from sandhi_core.serving.processes import Server
    port, log, body = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    with Server.start("s", [sys.executable, "-c", body, str(port)], port=port, log=log, grace=0.5) as server:
        server.wait_ready(30)
        while len(server.pids()) < 3: time.sleep(0.05)
        print(*server.pids(), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_servers_do_not_outlive_a_parent_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    body = textwrap.dedent(HEALTHY + STUBBORN + WITH_CHILDREN + SERVE)
    command = program(PARENT, free_port(), tmp_path / "log", body)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout and parent.stderr
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
        parent.send_signal(number)
        assert parent.wait(30) == -number
        said = parent.stderr.read()
    assert gone_within(pids, 10)
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


def test_a_killed_keeper_takes_the_server_along(tmp_path: Path) -> None:
    with started(tmp_path, HEALTHY + SERVE) as server:
        server.wait_ready(30)
        (pid,) = server.pids()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        assert gone_within([pid], 10)


@pytest.mark.parametrize("option", ["_SET_CHILD_SUBREAPER", "_SET_PDEATHSIG"])
def test_a_keeper_that_cannot_keep_starts_nothing(tmp_path: Path, option: str) -> None:
    body = f"""
        import sys
        from sandhi_core.serving import keeper
        keeper.{option} = 9999  # no option that the kernel knows
        sys.exit(keeper.main(["1", "touch", sys.argv[1]]))
    """
    done = subprocess.run(program(body, tmp_path / "made"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 126 and "nothing is started" in done.stderr and "prctl" in done.stderr
    assert not (tmp_path / "made").exists()


class Unkillable(subprocess.Popen[bytes]):
    """What a keeper is to whoever waits for it while the kernel cannot end it; no test can make one that is."""

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "this would take for ever"
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_stopping_is_bounded_whatever_the_kernel_does(tmp_path: Path) -> None:
    keeper = Unkillable([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    Server("chemist", "http://127.0.0.1:1", "/health", tmp_path / "log", keeper, 0.1).stop()
    assert subprocess.Popen.wait(keeper, 30) != 0


# --- commands -----------------------------------------------------------------------------------------------


def test_commands_of_engines() -> None:
    options = vllm.served(["chemist"], "float32", plugin=True)
    command = vllm.command(Path("/srv"), "chemist", options, 8001, python="/e/python", adapters={"a": "a.adapter"})
    assert command[:5] == ("/e/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/srv/chemist")
    assert command[5:13] == ("--served-model-name", "chemist", "--dtype", "float32", *vllm.PLUGIN)
    assert command[13:] == ("--lora-modules", "a=/srv/a.adapter", "--host", "127.0.0.1", "--port", "8001")
    assert "--quantization" not in vllm.served(["chemist"], "float32", plugin=False)
    assert transformers_command(Path("chemist"), 8001)[:5] == (
        *("python3", "-m", "transformers.cli.transformers", "serve", "chemist"),
    )
