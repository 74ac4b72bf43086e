"""`sandhi serve` as a command: started in order, watched, stopped, whatever goes wrong."""

import atexit
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandhi_core.__main__ import main
from sandhi_core.deploy.spec import DeploymentSpec, write_deployment
from sandhi_core.errors import PreflightError, ServingError, UsageError
from sandhi_core.layout import DEPLOYMENT, read_manifest
from sandhi_core.pools.pool import DeploySettings, Engine
from sandhi_core.serving import gpu, told
from sandhi_core.serving.fleet import Settings, _owners, commands
from sandhi_core.serving.members import members, needed, opened
from sandhi_core.serving.together import serving as together
from sandhi_core.verification.exports import verify
from sandhi_core.verification.servers import _engines
from tests.adapted import adapted_case
from tests.deployed import deployed
from tests.exported import MODELS, RANKS, VECTORS, Case, make_case, make_models
from tests.serving import standin
from tests.serving.cuda.owners import attached
from tests.serving.test_processes import alive, gone_within

CHECKOUT = Path(__file__).parents[2]


def with_deploy(case: Case, **deploy: Any) -> Path:
    settings = DeploySettings(device_memory="1GiB", **deploy)
    case.pool = case.pool.model_copy(update={"deploy": settings})
    return deployed(case)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), head_dim=32)  # vLLM's least on a CPU


@pytest.fixture(scope="module")
def export(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_deploy(make_case(tmp_path_factory.mktemp("root"), models))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.install(tmp_path_factory.mktemp("engine"))


def ports(count: int) -> int:
    """The first of so many free ports in a row, at most eight, which no other process that asks here is given."""
    for first in range(20000, 32000, 8):  # below those that the kernel gives to connections
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0sandhi-tests-{first}")  # a name that one process at a time can have (unix(7))
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        atexit.register(claim.close)  # it is kept until then
        return first
    raise AssertionError("no free ports")


def test_ports_are_given_to_one_process_alone() -> None:
    code = "from tests.serving.test_fleet import ports; print(ports(3)); input()"
    run = [sys.executable, "-c", code]
    with subprocess.Popen(run, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        ours = [ports(3) for _ in range(3)]
        other.communicate("\n")
    assert len({*ours, theirs}) == 4 and all(port % 8 == 0 for port in ours)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are the stand-in beside this Python, whatever the environment names."""
    monkeypatch.delenv("SANDHI_VLLM_PYTHON", raising=False)


@contextmanager
def serving(engine: Path, export: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "sandhi_core", "serve", str(export), "--port-base", str(ports(3)), *arguments]
    path = os.pathsep.join([str(engine), str(CHECKOUT)])
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(engine)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def document(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The first document on standard output."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != "}\n":
        line = process.stdout.readline()
        assert line, (lines, process.stderr and process.stderr.read())
        lines.append(line)
    found: dict[str, Any] = json.loads("".join(lines))
    return found


def running(found: dict[str, Any]) -> list[int]:
    return [pid for server in found["servers"] for pid in server["pids"]]


# --- what is started ----------------------------------------------------------------------------------------


def test_commands_are_the_deployments_with_the_place_put_in(export: Path) -> None:
    found = members(opened(export), extra=["--enforce-eager"])
    spec = DeploymentSpec.parse((export / DEPLOYMENT).read_bytes())
    assert [member.name for member in found] == [server.model for server in spec.servers]
    for member, server in zip(found, spec.servers, strict=True):
        command = member.command(export, python="/e/python", host="127.0.0.1")
        assert command[:5] == (
            *("/e/python", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(export / member.name)),
        )
        assert command[-5:] == ("--enforce-eager", "--host", "127.0.0.1", "--port", str(server.port))
        assert command[5:-5] == server.options and "--quantization" in server.options
        assert member.maps and member.metrics == "/metrics"
        here = member.command(export, python="python3", host="127.0.0.1")
        assert shlex.split(server.shell) == [word for word in here if word != "--enforce-eager"]


def test_adapters_are_found_where_the_export_lies(tmp_path: Path) -> None:
    root = deployed(adapted_case(tmp_path / "built"))
    moved = tmp_path / "moved = elsewhere"
    shutil.copytree(root, moved, copy_function=os.link)
    base, *_ = members(opened(moved), only=["ann"])
    assert base.models == ("ann", "ben", "cat") and not base.maps
    command = base.command(moved, python="p", host="h")
    told = [json.loads(word) for word in command if word.startswith("{")]  # of a path with = in it
    assert {"name": "ann", "path": str(moved / "ann.adapter")} in told
    assert not any(str(root) in word for word in command)


def test_ports_stay_a_models_own_whichever_are_started(export: Path) -> None:
    whole = {member.name: member.port for member in members(opened(export), port_base=9000)}
    assert sorted(whole.values()) == [9000, 9001, 9002]
    (one,) = members(opened(export), only=["tied"], port_base=9000)
    assert one.port == whole["tied"]


def test_what_cannot_be_served_is_refused(export: Path, models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no model nobody .*it holds sharded, single, tied"):
        members(opened(export), only=["nobody", "tied"])
    with pytest.raises(UsageError, match="ports from 65000 on"):
        members(opened(export), port_base=65000)
    with pytest.raises(UsageError, match=r"holds no sandhi\.json"):
        opened(export / "tied")
    adjusted = opened(with_deploy(make_case(tmp_path, models, RANKS, VECTORS)))
    with pytest.raises(ServingError, match=r"model single: adds residuals .*--engine vllm"):
        members(adjusted, engine="transformers", only=["single"])
    assert members(adjusted, engine="transformers", only=["sharded"])[0].engine == "transformers"


def test_an_export_of_transformers_is_served_by_either_engine(models: dict[str, Path], tmp_path: Path) -> None:
    root = with_deploy(make_case(tmp_path, models), engine="transformers")
    stock, ours = (members(opened(root), engine=engine, only=["tied"])[0] for engine in (None, "vllm"))
    assert stock.command(root, python="p", host="h")[:5] == (
        "p",
        "-m",
        "transformers.cli.transformers",
        "serve",
        "tied",
    )
    assert stock.metrics is None
    assert ours.options == (
        *("--served-model-name", "tied", "--dtype", "float32"),
        *("--quantization", "sandhi", "--load-format", "sandhi"),
    )


DAMAGE = {
    "deployment.json": lambda root: (root / DEPLOYMENT).unlink(),
    "manifest": lambda root: _edit(root, manifest="0" * 64),
    "command": lambda root: _edit(root, point="other"),
    "file": lambda root: _cut(root),
    "links": lambda root: _copied(root),
    "configuration": lambda root: _replaced(root / "tied" / "config.json", b"{}"),
    "tokenizer": lambda root: _replaced(root / "single" / "tokenizer.json", b"{}"),
    "index": lambda root: (root / "tied" / "model.safetensors.index.json").unlink(),
}


def _edit(root: Path, **changes: str) -> None:
    document = json.loads((root / DEPLOYMENT).read_text()) | changes
    (root / DEPLOYMENT).unlink()
    (root / DEPLOYMENT).write_text(json.dumps(document))


def _cut(root: Path) -> None:
    path = root / "tied" / "private.safetensors"
    _replaced(path, path.read_bytes()[:-8])


def _copied(root: Path) -> None:
    path = next((root / "tied").glob("shared-*"))
    _replaced(path, path.read_bytes())


def _replaced(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_not_proved_is_not_started(export: Path, tmp_path: Path, engine: Path, damage: str) -> None:
    root = tmp_path / "export"
    shutil.copytree(export, root, copy_function=os.link)
    DAMAGE[damage](root)
    with serving(engine, root, "--json") as process:
        found = document(process)
        assert process.wait(60) == 1
    assert not found["ok"] and found["problems"][0]["remedy"]
    if damage not in ("file", "links"):
        with pytest.raises(PreflightError):
            opened(root)


@pytest.mark.parametrize(("command", "version"), [("serve", 1), ("verify", 3), ("render --to litellm --out out", 3)])
def test_a_deployment_of_another_version_is_refused_by_its_version(
    export: Path, tmp_path: Path, command: str, version: int
) -> None:
    root = tmp_path / "export"
    shutil.copytree(export, root, copy_function=os.link)
    document = json.loads((root / DEPLOYMENT).read_text()) | {"schema_version": version, "more": {}}
    for name in document["servers"][0].keys() & {"metrics", "engine"}:
        del document["servers"][0][name]
    (root / DEPLOYMENT).unlink()
    (root / DEPLOYMENT).write_text(json.dumps(document))
    name, *options = command.split()
    run = [sys.executable, "-m", "sandhi_core", name, str(root), "--json", *options]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.returncode == 1 and problem["file"].endswith(DEPLOYMENT)
    assert problem["message"] == f"is of schema version {version}, this Sandhi reads 2"
    assert problem["remedy"] == "use the Sandhi that wrote it, or build the export again with this one"
    assert not (tmp_path / "out").exists()


# --- running ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_are_started_in_order_and_stopped(
    export: Path, engine: Path, tmp_path: Path, number: signal.Signals
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(export, moved, copy_function=os.link)
    with serving(engine, moved, "--json", "--logs", str(tmp_path / "logs")) as process:
        found = document(process)
        names = [server["name"] for server in found["servers"]]
        assert found["ok"] and sorted(names) == sorted(MODELS) and found["export"] == str(moved)
        for server in found["servers"]:
            with urllib.request.urlopen(server["url"] + "/models", timeout=10) as answer:
                assert json.load(answer)["data"][0]["id"] == server["name"]
            assert server["metrics"] == server["url"].removesuffix("/v1") + "/metrics"
            assert Path(server["log"]).read_text() == f"serving {server['name']}\n"
        pids = running(found)
        assert len(pids) == 3 and all(map(alive, pids))
        # What several hold lies in memory once; each has it mapped.
        assert 0 < found["memory"]["pss"] < found["memory"]["rss"]
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert not any(map(alive, pids))
    places = [said.index(f"starting {name}") for name in names]
    assert places == sorted(places) and said.endswith("stopped\n")


def test_people_read_addresses_and_memory(export: Path, engine: Path) -> None:
    with serving(engine, export, "--only", "tied", "single") as process:
        assert process.stdout is not None
        text = ""
        while "Ctrl-C stops all servers" not in text:
            text += process.stdout.readline()
    assert text.count("/metrics") == 2 and "/v1" in text and "in all " in text and "sharded" not in text


def test_one_that_dies_ends_all(export: Path, engine: Path, tmp_path: Path) -> None:
    with serving(engine, export, "--json", "--", "--die-at", f"single:{tmp_path / 'now'}") as process:
        pids = running(document(process))
        (tmp_path / "now").touch()
        assert process.wait(60) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert "model single" in said and "ended with status 1" in said and "out of memory" in said
    assert gone_within(pids, 5)


def test_one_that_dies_while_another_starts_is_not_waited_for(export: Path, engine: Path, tmp_path: Path) -> None:
    first, _, last = (member.name for member in members(opened(export)))
    dying = ("--hang", last, "--die-at", f"{first}:{tmp_path / 'now'}")
    with serving(engine, export, "--json", "--", *dying) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith(f"starting {last}"):
            pass
        (tmp_path / "now").touch()
        (problem,) = document(process)["problems"]
        assert process.wait(60) == 1
    assert problem["model"] == first and "out of memory" in problem["message"]


def test_one_that_does_not_come_up_ends_those_before(export: Path, engine: Path) -> None:
    last = members(opened(export))[-1].name
    with serving(engine, export, "--json", "--ready-timeout", "2", "--", "--hang", last) as process:
        found = document(process)
        assert process.wait(60) == 1
    assert f"model {last}" not in str(found) and found["problems"][0]["model"] == last
    assert "was not ready within 2 seconds" in found["problems"][0]["message"]


def test_a_stranger_on_the_port_is_told(export: Path, engine: Path) -> None:
    with serving(engine, export, "--json", "--only", "tied", "--", "--alias", "other") as process:
        (problem,) = document(process)["problems"]
    assert "does not answer for tied, but for other" in problem["message"]


TRANSFORMERS = """#!/bin/sh
# The stand-in as `transformers serve` is started: -m transformers.cli.transformers serve MODEL
model=$4; shift 4
exec {python} -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name "$model" "$@"
"""


@pytest.mark.parametrize("alias", [(), ("--", "--alias", "other")])
def test_transformers_must_answer_for_its_model(
    export: Path, engine: Path, tmp_path: Path, alias: tuple[str, ...]
) -> None:
    python = tmp_path / "python"
    python.write_text(TRANSFORMERS.format(python=sys.executable))
    python.chmod(0o755)
    given = ("--json", "--engine", "transformers", "--python", str(python), "--only", "tied", "--logs", str(tmp_path))
    with serving(engine, export, *given, *alias) as process:
        found = document(process)
    assert found["ok"] == (not alias)
    for problem in found["problems"]:
        assert problem["model"] == "tied" and problem["file"] == str(tmp_path / "tied.log")
        assert "answers 404 to a request" in problem["message"]


def test_a_taken_port_is_told_before_anything_starts(export: Path, engine: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        first = other.getsockname()[1] - 2  # the last one's
        with serving(engine, export, "--json", "--port-base", str(first)) as process:
            (problem,) = document(process)["problems"]
            assert process.wait(60) == 1
            assert process.stderr is not None and "starting" not in process.stderr.read()
    assert f"port {first + 2} of 127.0.0.1 is in use" in problem["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--python", "/nowhere/python"), "'/nowhere/python' is no program"),
        (("--proxy", "/nowhere/python"), "'/nowhere/python' is no program"),
        (("--proxy", "--proxy-port", "99999"), "--proxy-port 99999 is no port"),
        (("--proxy", "--port-base", "23456", "--proxy-port", "23457"), "--proxy-port 23457 is the port of single"),
        (("--ready-timeout", "nan"), "nan is no number of seconds"),
        (("--", "--port", "23999"), "--port after -- would move a server"),
        (("--", "--host=0.0.0.0"), "--host=0.0.0.0 after -- would move a server"),
    ],
)
def test_what_can_be_told_beforehand_is(
    export: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("SANDHI_VLLM_PYTHON", sys.executable)
    assert main(["serve", str(export), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and "starting" not in said


def test_a_proxy_that_others_reach_needs_a_key(export: Path, engine: Path) -> None:
    with serving(engine, export, "--json", "--proxy", "--host", "0.0.0.0") as process:
        (problem,) = document(process)["problems"]
        assert process.wait(60) == 2
    assert "set LITELLM_MASTER_KEY" in problem["remedy"]


@pytest.mark.skipif("SANDHI_LITELLM_PYTHON" not in os.environ, reason="needs the Python of an environment with LiteLLM")
def test_litellms_proxy_routes_by_name(export: Path, engine: Path) -> None:
    """The real proxy. It takes minutes to install, so that CI holds its file to documented fields only."""
    proxy = ("--proxy", os.environ["SANDHI_LITELLM_PYTHON"], "--proxy-port", str(ports(4) + 3))
    with serving(engine, export, "--json", *proxy) as process:
        found = document(process)
        assert found["ok"], found["problems"]
        for name in MODELS:
            body = {"model": name, "messages": [{"role": "user", "content": "who?"}]}
            request = urllib.request.Request(
                f"{found['proxy']}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"][0]["message"]["content"] == f"I am {name}"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_ctrl_c_while_they_start(export: Path, engine: Path) -> None:
    first = members(opened(export))[0].name
    with serving(engine, export, "--", "--hang", first) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(f"starting {first}")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "nothing is left running" in process.stderr.read()


def test_a_dry_run_starts_nothing(export: Path, engine: Path) -> None:
    with serving(engine, export, "--json", "--dry-run", "--proxy", "--", "--enforce-eager") as process:
        found = document(process)
        assert process.wait(60) == 0
    assert all("--enforce-eager" in server["command"] for server in found["servers"]) and found["proxy"]
    assert found["owners"] == []
    for server in found["servers"]:
        assert server["directory"] == str(export) and server["environment"]["HF_HUB_OFFLINE"] == "1"


NOTED = """#!/bin/sh
pwd; echo "$HF_HUB_OFFLINE"; echo "$#"; for word; do echo "$word"; done
"""


@pytest.mark.parametrize("by", ["vllm", "transformers"])
def test_lines_of_a_dry_run_work_in_a_shell_from_anywhere(export: Path, tmp_path: Path, by: Engine) -> None:
    moved = tmp_path / "moved 'here' $HOME"
    shutil.copytree(export, moved, copy_function=os.link)
    python = tmp_path / "a python"
    python.write_text(NOTED)
    python.chmod(0o755)
    deployed = opened(moved)
    chosen = members(deployed, engine=by, only=["tied"])
    settings = Settings(python=str(python))
    comment, line = told.planned(commands(deployed, chosen, settings)).splitlines()
    assert comment.startswith("# tied: http://127.0.0.1:")
    said = subprocess.run(["sh", "-c", line], cwd="/", capture_output=True, text=True, check=True).stdout.splitlines()
    expected = chosen[0].command(moved, python=str(python), host="127.0.0.1")[1:]
    assert said == [str(moved), "1", str(len(expected)), *expected]


# --- what engines compute on --------------------------------------------------------------------------------

PYTHON = """#!/bin/sh
# A GPU's driver at the boundary at which ctypes calls it; all else is real.
if [ "$2" = sandhi_core.serving.cuda.owner ]; then
    shift 2
    exec {python} -c 'import sys
from sandhi_core.serving.cuda.owner import main
from tests.serving.cuda.fake import driver
sys.exit(main(sys.argv[1:], driver()))' "$@"
fi
exec {python} "$@"
"""


def test_on_a_gpu_owners_are_started_before_the_servers(
    export: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    arguments = ("--json", "--device", "cuda", "--python", str(python), "--logs", str(tmp_path))
    with serving(engine, export, *arguments) as process:
        found = document(process)
        assert found["ok"], found["problems"]
        (owner,) = found["owners"]
        path = Path(owner["socket"].removeprefix("unix:"))
        for server in found["servers"]:
            (pid,) = server["pids"]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            told = json.loads(words[words.index("--model-loader-extra-config") + 1])
            assert told["owner"].replace("{rank}", "0") == str(path)
            held = attached(export, path, server["name"], check="full")  # as the plugin does
            assert held.tensors
            held.close()
        os.kill(owner["pids"][0], signal.SIGKILL)  # nothing new could attach: all end
        assert process.wait(60) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.index("starting the owner") < said.index("starting single") and "owner 0" in said
    assert gone_within([*running(found), *owner["pids"]], 5)


def test_every_rank_has_an_owner(export: Path) -> None:
    extra = ["--tensor-parallel-size", "2", "--model-loader-extra-config", '{"digests": "full"}']
    found = members(opened(export), device="cuda", extra=extra, port_base=9000)
    for member in found:
        assert json.loads(member.options[-1])["digests"] == "full"
    first, second = _owners(found)
    assert first.socket != second.socket
    command = second.command(export, "p")
    assert command[-4:] == ("--tensor-parallel", "2", "--rank", "1") and command[4:6] == ("--device", "1")
    own = ["--model-loader-extra-config", '{"owner": "/run/mine.sock"}']
    assert _owners(members(opened(export), device="cuda", extra=own)) == []


@pytest.mark.parametrize("sees", [True, False])
def test_engines_compute_where_their_torch_sees_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    (tmp_path / "torch.py").write_text(f"class cuda: is_available = staticmethod(lambda: {sees})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "LIBRARY", "libnone.so")
    assert gpu.device_of("/there/is/none") == "cpu"  # without a driver nothing is asked
    monkeypatch.setattr(gpu, "LIBRARY", "libc.so.6")
    assert gpu.device_of(sys.executable) == ("cuda" if sees else "cpu")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--tensor_parallel_size=3"], "4 attention heads cannot be divided among 3"),
        (["--pipeline-parallel-size", "2"], "pipeline parallelism is not supported"),
        (["--enable-lora"], "LoRA is not supported"),
        (["--offload_group_size", "2"], "weight offloading is not supported"),
        (["--cpu-offload-gb=0.5"], "weight offloading is not supported"),
        (["--spec-method", "ngram"], "speculative decoding is not supported"),
        (["--spec-tokens=3"], "speculative decoding is not supported"),
        (["-q", "fp8"], "--quantization is fp8"),
        (["--dtype", "bfloat16"], "the engine computes in bfloat16"),
    ],
)
def test_what_the_plugin_cannot_serve_is_refused_before_anything_starts(
    export: Path, extra: list[str], message: str
) -> None:
    with pytest.raises(PreflightError, match=re.escape(message)):
        members(opened(export), extra=extra)


@pytest.mark.parametrize("plugin", [True, False])
def test_heads_that_vllm_lacks_on_a_cpu_are_refused_before_anything_starts(tmp_path: Path, plugin: bool) -> None:
    root = with_deploy(make_case(tmp_path, make_models(tmp_path / "models", head_dim=24)), plugin=plugin)
    with pytest.raises(PreflightError, match="its heads have 24 elements") as refused:
        members(opened(root), only=["sharded"])
    remedy = refused.value.problem.remedy
    assert "`engine: transformers` in the pool file" in remedy and "--engine transformers" in remedy
    assert members(opened(root), only=["sharded"], engine="transformers")
    assert members(opened(root), only=["sharded"], device="cuda")


# --- engines by model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tied` is served by transformers."""
    case = make_case(tmp_path_factory.mktemp("mixed"), models)
    entries = (e.model_copy(update={"engine": "transformers" if e.name == "tied" else None}) for e in case.pool.models)
    case.pool = case.pool.model_copy(update={"models": tuple(entries)})
    return with_deploy(case)


def test_each_model_is_served_by_its_engine_with_options_of_its_own(mixed: Path) -> None:
    found = {m.name: m for m in members(opened(mixed), port_base=9000, extra=["--enforce-eager"])}
    assert {name: m.engine for name, m in found.items()} == {
        "sharded": "vllm",
        "single": "vllm",
        "tied": "transformers",
    }
    assert len({m.port for m in found.values()}) == 3
    for member in found.values():
        assert ("--enforce-eager" in member.options) == (member.engine == "vllm")
    (alone,) = members(opened(mixed), only=["tied"], extra=["--log-level", "debug"])
    assert alone.options == ("--log-level", "debug")
    assert {m.engine for m in members(opened(mixed), engine="vllm")} == {"vllm"}


def test_vllms_python_is_asked_for_where_any_server_is_one_of_vllm(mixed: Path) -> None:
    deployed = opened(mixed)
    assert needed(deployed) == needed(deployed, only=["tied", "single"]) == "vllm"
    assert needed(deployed, only=["tied"]) == needed(deployed, "transformers") == "transformers"
    assert needed(deployed, "vllm", ["tied"]) == "vllm"
    with pytest.raises(UsageError, match="holds no model nobody"):
        members(deployed, only=["nobody"])


def test_a_deployment_of_two_engines_is_held_to_what_its_servers_say(mixed: Path, tmp_path: Path) -> None:
    assert verify(mixed)[1]
    (shutil.copytree(mixed, tmp_path / "copy", copy_function=os.link) / DEPLOYMENT).unlink()
    spec = DeploymentSpec.parse((mixed / DEPLOYMENT).read_bytes())
    servers = tuple(s.model_copy(update={"engine": "vllm"}) for s in spec.servers)
    write_deployment(tmp_path / "copy", spec.model_copy(update={"servers": servers}))
    said = "\n".join(problem["message"] for problem in verify(tmp_path / "copy")[0]["problems"])
    assert "servers.tied.port is null, the export gives 80" in said and "servers.single" not in said


def test_what_is_deployed_on_transformers_is_not_measured_with_vllm(mixed: Path, export: Path) -> None:
    def engines(root: Path, asked: Any) -> dict[str, str]:
        return dict(_engines(root, read_manifest(root), asked))

    assert engines(mixed, "vllm") == {"sharded": "vllm", "single": "vllm", "tied": "transformers"}
    assert set(engines(mixed, "transformers").values()) == {"transformers"}
    assert set(engines(export, "vllm").values()) == {"vllm"}


def test_options_of_vllm_that_have_no_value_are_told(export: Path) -> None:
    with pytest.raises(UsageError, match=r"vLLM.s options: .*tensor-parallel-size"):
        members(opened(export), extra=["--tensor-parallel-size", "two"])
    for given in ("{", "[]"):
        with pytest.raises(UsageError, match=rf"--model-loader-extra-config: '\{given[0]}.*' is no JSON object"):
            members(opened(export), extra=["--model-loader-extra-config", given])


def test_batch_invariance_is_refused_by_the_environment_that_engines_are_given(
    export: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert members(opened(export), environment={"VLLM_BATCH_INVARIANT": "0"})
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert members(opened(export))  # rendered for elsewhere
    with serving(engine, export, "--json", "--dry-run") as process:
        problems = document(process)["problems"]
        assert process.wait(60) == 1
    assert {problem["message"] for problem in problems} == {"batch invariance is not supported"}
    with pytest.raises(PreflightError, match="batch invariance is not supported"):
        together("vllm", {"tied": export / "tied"}, sys.executable).__enter__()


def test_the_engines_python_is_that_of_the_environment(
    export: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("SANDHI_VLLM_PYTHON", str(python))
    with serving(engine, export, "--json", "--dry-run") as process:
        assert {server["command"][0] for server in document(process)["servers"]} == {str(python)}
