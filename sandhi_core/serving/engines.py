"""Every model of a pool on a real server of its own, all at once, ready to be asked and looked at from outside."""

import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sandhi_core.deploy import vllm
from sandhi_core.errors import ServingError, UsageError
from sandhi_core.memory import Holder, holder, weights_in
from sandhi_core.pool import DeploySettings
from sandhi_core.serving.census import WORKER
from sandhi_core.serving.completions import fetch
from sandhi_core.serving.processes import QUIET, Server

Engine = Literal["transformers", "vllm"]
PYTHON = "SANDHI_VLLM_PYTHON"
"""The environment variable that names the Python of a vLLM with this package. It is no setting of a pool: where an
engine lies is a matter of the machine, and moving it must not make a pool's records stale."""
TIMEOUT = 900.0  # seconds within which all servers of a pool must be ready
_CONTEXT = 256  # tokens of a sequence at most, prompt and answer: enough to see that the weights are right
_CACHE = 64 << 20  # bytes of vLLM's cache
_HOST = "127.0.0.1"
_REMEDY = "free memory or processors, then measure again"


@dataclass(frozen=True)
class Member:
    """A model that is served. `pids`: its processes, that with the weights first. `unmapped`: by process, bytes of
    parameters that lie in no mapping of a weight file."""

    model: str
    directory: Path
    url: str
    context: int  # tokens of a sequence at most
    pids: tuple[int, ...]
    unmapped: Mapping[int, int]

    def holders(self) -> list[Holder]:
        """Its processes as they are now. Raises ServingError where one is gone."""
        try:
            return [holder(self.model, self.directory, pid, self.unmapped.get(pid, 0)) for pid in self.pids]
        except OSError as error:
            raise ServingError("a process of its server has ended", model=self.model, remedy=_REMEDY) from error


@contextmanager
def serving(
    engine: Engine, directories: Mapping[str, Path], python: str = "", *, plugin: bool = True, timeout: float = TIMEOUT
) -> Iterator[list[Member]]:
    """Servers of all models, by name, until the block ends, whichever way it ends. `python`: see `python_of`;
    `plugin`: whether vLLM maps shared tensors, as for an export.

    Raises ServingError where one cannot load its model, or not all can within `timeout` seconds; only then the logs
    are kept, in the directory for temporary files.
    """
    python = python_of(engine, python)
    logs = Path(tempfile.mkdtemp(prefix="sandhi-serving-"))
    try:
        with ExitStack() as running:
            starting = _held if engine == "transformers" else _vllm
            yield starting(directories, python, logs, running, plugin, time.monotonic() + timeout)
    except ServingError:
        raise
    except BaseException:
        shutil.rmtree(logs, ignore_errors=True)
        raise
    else:
        shutil.rmtree(logs, ignore_errors=True)


def python_of(engine: Engine, given: str = "") -> str:
    """The interpreter of an engine: the one that is given, or for vLLM that of the environment variable, or this one.

    Raises UsageError where there is none.
    """
    python = given or (os.environ.get(PYTHON, "") if engine == "vllm" else "")
    if python:
        found = shutil.which(Path(python).expanduser())
        if found is None:
            raise UsageError(f"{python!r} is no program", remedy="give the path of a Python interpreter")
        return str(Path(found).absolute())  # not resolved: a virtual environment is found by the link
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "there is no vLLM beside this Python",
            remedy=f"name the Python that has it, and this package, by --python or {PYTHON}",
        )
    return sys.executable


def proving(deploy: DeploySettings) -> tuple[Engine, str]:
    """What the memory of a pool's export is proved with, and its Python: the engine that it is deployed on where that
    maps shared tensors and this machine says by the environment variable where it is, else transformers. The record of
    the proof says which it was: what one engine shares is no claim for another."""
    python = os.environ.get(PYTHON, "")
    if deploy.engine == "vllm" and deploy.plugin and deploy.adapters is None and python:
        return "vllm", python_of("vllm", python)
    return "transformers", ""


# --- transformers -------------------------------------------------------------------------------------------


def _held(
    directories: Mapping[str, Path], python: str, logs: Path, running: ExitStack, plugin: bool, deadline: float
) -> list[Member]:
    port = _free_port()
    words = [word for model, directory in directories.items() for word in (model, str(directory))]
    command = [python, "-m", "sandhi_core.serving.hold", str(port), *words]
    names = ", ".join(sorted(directories))
    settings = _environment() | {"TOKENIZERS_PARALLELISM": "false"}
    server = Server.start(names, command, port=port, log=logs / "hold.log", environment=settings, grace=2.0)
    running.enter_context(server)
    server.wait_ready(max(deadline - time.monotonic(), 0.0))
    said = {found["model"]: found for found in map(json.loads, fetch(server.url).splitlines())}
    for model, found in sorted(said.items()):
        if "error" in found:
            remedy = "check the directory with `sandhi check` or `sandhi verify`"
            raise ServingError(found["error"], model=model, file=str(directories[model]), remedy=remedy)
    if gone := sorted(directories.keys() - said.keys()):
        raise ServingError("its process ended while it loaded the model", model=gone[0], remedy=_REMEDY)
    return [_holding(model, directory, said[model]) for model, directory in directories.items()]


def _holding(model: str, directory: Path, said: Mapping[str, Any]) -> Member:
    url, pid = f"http://{_HOST}:{said['port']}", said["pid"]
    return Member(model, directory, url, context_of(directory), (pid,), {pid: said["unmapped"]})


# --- vLLM ---------------------------------------------------------------------------------------------------


def _vllm(
    directories: Mapping[str, Path], python: str, logs: Path, running: ExitStack, plugin: bool, deadline: float
) -> list[Member]:
    started = [(m, d, _started(m, d, python, logs, running, plugin)) for m, d in directories.items()]
    for _, _, server in started:
        server.wait_ready(max(deadline - time.monotonic(), 0.0))
    return [_answering(model, directory, server) for model, directory, server in started]


def _answering(model: str, directory: Path, server: Server) -> Member:
    """What its workers say is asked for: they alone know their parameters."""
    asked = {"method": "sandhi_census", "args": [str(directory)]}
    found = json.loads(fetch(f"{server.url}/collective_rpc", asked))["results"]
    unmapped = {int(worker["pid"]): int(worker["unmapped"]) for worker in found}
    pids = (*unmapped, *(pid for pid in server.pids() if pid not in unmapped))
    return Member(model, directory, server.url, context_of(directory), pids, unmapped)


def _started(model: str, directory: Path, python: str, logs: Path, running: ExitStack, plugin: bool) -> Server:
    port = _free_port()
    sizes = ["--max-model-len", str(context_of(directory)), "--kv-cache-memory-bytes", str(_CACHE)]
    ((dtype, _),) = weights_in(directory).most_common(1)
    # By itself vLLM would serve float32 in another dtype: a copy, and other answers.
    options = vllm.served([model], vllm.served_dtype(model, dtype), plugin)
    options += ("--enforce-eager", *sizes, "--worker-extension-cls", WORKER)
    command = vllm.command(directory.parent, directory.name, options, port, python=python)
    settings = _environment() | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # its workers can be asked; it listens on this machine alone
    }
    server = Server.start(model, command, port=port, log=logs / f"{model}.log", environment=settings)
    running.enter_context(server)
    return server


# --- both ---------------------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[2])
    paths = filter(None, (package, os.environ.get("PYTHONPATH", "")))
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **QUIET}


def context_of(directory: Path) -> int:
    """Tokens of a sequence at most, as models are served here."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    made_for = (config.get("text_config") or config).get("max_position_embeddings")
    return min(_CONTEXT, made_for or _CONTEXT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
