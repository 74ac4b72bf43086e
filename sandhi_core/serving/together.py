"""Every model of a pool on a real server of its own, all at once, ready to be asked and looked at from outside."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandhi_core.deploy import vllm
from sandhi_core.errors import CheckpointError, SandhiError, ServingError
from sandhi_core.memory import Holder, WeightFiles, holder, weights_in
from sandhi_core.pools.pool import Engine
from sandhi_core.serving.census import FOLDER, told
from sandhi_core.serving.completions import fetch
from sandhi_core.serving.engines import context_of, environment, python_of
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.ports import HOST, reserved
from sandhi_core.serving.processes import Server, stop_all
from sandhi_core.serving.slices import matrices
from sandhi_core.serving.vllm_plugin.flags import settings_from_flags
from sandhi_core.serving.vllm_plugin.refuse import require_servable

TIMEOUT = 900.0  # seconds within which all servers of a pool must be ready
WORKER = "sandhi_core.serving.vllm_plugin.census.CensusWorker"
"""What vLLM takes for --worker-cls."""
Engines = Engine | Mapping[str, Engine]
"""One engine for all models, or each one's."""
_CACHE = 64 << 20  # bytes of vLLM's cache
_REMEDY = "free memory or processors, then measure again"


@dataclass(frozen=True)
class Served:
    """A model that is served. `pids`: its processes, that with the weights first. `unmapped`: by process, bytes of
    parameters that lie in no mapping of a weight file."""

    model: str
    engine: Engine
    directory: Path
    url: str
    context: int  # tokens of a sequence at most
    pids: tuple[int, ...]
    unmapped: Mapping[int, int]

    def holders(self, files: WeightFiles) -> list[Holder]:
        """What its processes map of weight files now. Raises ServingError where one is gone."""
        try:
            return [holder(self.model, files, pid, self.unmapped.get(pid, 0)) for pid in self.pids]
        except OSError as error:
            raise ServingError("a process of its server has ended", model=self.model, remedy=_REMEDY) from error


@contextmanager
def serving(
    engine: Engines, directories: Mapping[str, Path], python: str = "", *, plugin: bool = True, timeout: float = TIMEOUT
) -> Iterator[list[Served]]:
    """Servers of all models, by name, until the block ends, whichever way it ends. `python`: vLLM's, see `python_of`;
    `plugin`: whether vLLM maps shared tensors, as for an export.

    Raises ServingError where one cannot load its model, or not all can within `timeout` seconds; before anything is
    started CheckpointError where there are no weights, ProofError for a dtype that vLLM lacks, and PreflightError for
    what the plugin cannot serve. Logs are kept in the directory for temporary files where anything fails, in the block
    too, but not where it is interrupted.
    """
    ours, theirs = (
        {model: directory for model, directory in directories.items() if engine_for(engine, model) == one}
        for one in ("transformers", "vllm")
    )
    python = python_of("vllm", python) if theirs else ""
    dtypes = {model: _servable(model, directory, plugin) for model, directory in theirs.items()}
    logs = Path(tempfile.mkdtemp(prefix="sandhi-serving-"))
    try:
        with reserved(1 + len(theirs)) as (port, *ports), ExitStack() as running:
            started: list[Server] = []
            running.callback(stop_all, started)
            deadline = time.monotonic() + timeout
            served = _transformers(ours, port, logs, started, deadline) if ours else []
            served += _vllm(theirs, dtypes, python, ports, logs, started, deadline, plugin) if theirs else []
            yield sorted(served, key=lambda one: list(directories).index(one.model))
    except BaseException as error:
        if isinstance(error, Exception) and any(logs.iterdir()):
            _name(logs, error)
        else:
            shutil.rmtree(logs, ignore_errors=True)
        raise
    else:
        shutil.rmtree(logs, ignore_errors=True)


def _name(logs: Path, error: Exception) -> None:
    """Say in an error where the logs are, which stay: nothing else does."""
    if not isinstance(error, SandhiError):
        error.add_note(f"the servers' logs are in {logs}")
    elif error.problem.file is None:
        error.amend(file=str(logs))
    elif not Path(error.problem.file).is_relative_to(logs):
        error.amend(remedy=f"{error.problem.remedy}; the servers' logs are in {logs}")


def engine_for(engine: Engines, model: str) -> Engine:
    return engine if isinstance(engine, str) else engine[model]


# --- transformers -------------------------------------------------------------------------------------------


def _transformers(
    directories: Mapping[str, Path], port: int, logs: Path, started: list[Server], deadline: float
) -> list[Served]:
    words = [word for model, directory in directories.items() for word in (model, str(directory))]
    command = [python_of("transformers"), "-m", "sandhi_core.serving.hold", str(port), *words]
    names = ", ".join(sorted(directories))
    settings = environment() | {"TMPDIR": str(logs)}
    server = Server.start(names, command, port=port, log=logs / "hold.log", environment=settings, grace=2.0)
    started.append(server)
    server.wait_ready(max(deadline - time.monotonic(), 0.0))
    said = {found["model"]: found for found in fetch(server.url, names)}
    for model, found in sorted(said.items()):
        if "error" in found:
            remedy = "check the directory with `sandhi check` or `sandhi verify`"
            raise ServingError(found["error"], model=model, file=str(directories[model]), remedy=remedy)
    if gone := sorted(directories.keys() - said.keys()):
        raise ServingError("its process ended while it loaded the model", model=gone[0], remedy=_REMEDY)
    return [
        Served(
            m, "transformers", d, f"http://{HOST}:{f['port']}", context_of(d), (f["pid"],), {f["pid"]: f["unmapped"]}
        )
        for m, d, f in ((model, directory, said[model]) for model, directory in directories.items())
    ]


# --- vLLM ---------------------------------------------------------------------------------------------------


def _vllm(
    directories: Mapping[str, Path],
    dtypes: Mapping[str, str],
    python: str,
    ports: Sequence[int],
    logs: Path,
    started: list[Server],
    deadline: float,
    plugin: bool,
) -> list[Served]:
    servers = {}
    for (model, directory), port in zip(directories.items(), ports, strict=True):
        servers[model] = _started(model, directory, dtypes[model], python, port, logs, plugin)
        started.append(servers[model])
    for server in servers.values():
        server.wait_ready(max(deadline - time.monotonic(), 0.0))
    return [_answering(model, directory, servers[model], logs) for model, directory in directories.items()]


def _servable(model: str, directory: Path, plugin: bool) -> str:
    """The dtype that it is served in: that of its files. By itself vLLM would serve float32 in another: a copy, and
    other answers."""
    if not (found := weights_in(directory)):
        remedy = "give the directory of a whole checkpoint"
        raise CheckpointError("holds no weights in safetensors files", model=model, file=str(directory), remedy=remedy)
    ((most, _),) = found.most_common(1)
    dtype = vllm.served_dtype(model, most)
    if plugin:
        mapped = MappedModel.open(directory)
        settings = settings_from_flags(vllm.served([model], dtype, plugin), "cpu", os.environ)
        require_servable(model, mapped.config(), matrices(mapped.tensors, mapped.shared()), settings)
    return dtype


def _started(model: str, directory: Path, dtype: str, python: str, port: int, logs: Path, plugin: bool) -> Server:
    sizes = ["--max-model-len", str(context_of(directory)), "--kv-cache-memory-bytes", str(_CACHE)]
    options = (*vllm.served([model], dtype, plugin), "--enforce-eager", *sizes, "--worker-cls", WORKER)
    command = vllm.command(directory.parent, directory.name, options, port, python=python)
    census = logs / f"{model}.census"
    census.mkdir(0o700)
    settings = environment() | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        FOLDER: str(census),
    }
    return Server.start(model, command, port=port, log=logs / f"{model}.log", environment=settings)


def _answering(model: str, directory: Path, server: Server, logs: Path) -> Served:
    """What its workers have told of themselves: they alone know their parameters."""
    unmapped = told(logs / f"{model}.census")
    if not unmapped:
        raise ServingError("none of its workers has told what it holds", model=model, remedy="see its log")
    pids = (*unmapped, *(pid for pid in server.pids() if pid not in unmapped))
    return Served(model, "vllm", directory, server.url, context_of(directory), pids, unmapped)
