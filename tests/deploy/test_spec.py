"""The specification: refused without proof, the same bytes twice, and commands that a shell can run."""

import importlib.util
import json
import math
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sandhi_core.checkpoints.safetensors_file import DTYPES
from sandhi_core.deploy.spec import DeploymentSpec, deployment_spec, write_deployment
from sandhi_core.deploy.vllm import PLUGIN
from sandhi_core.errors import ProofError
from sandhi_core.pools.pool import DeploySettings
from sandhi_core.records import DTYPE_BYTES, Manifest
from tests.deploy import pools


def spec(**changes: Any) -> DeploymentSpec:
    return deployment_spec(**pools.arguments(**changes))


def test_the_largest_model_starts_first_and_the_command_is_complete() -> None:
    servers = spec().servers
    assert [(server.model, server.port) for server in servers] == [("b", 8000), ("a", 8001), ("c", 8002)]
    # 380 kB are free beside private copies, a third of them for b: more tokens than it was made for.
    assert shlex.split(servers[0].shell) == [
        *("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/srv/exports/p q/b"),
        *("--served-model-name", "b", "--dtype", "bfloat16", "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", "126666", "--gpu-memory-utilization", "0.3267"),
        *("--host", "127.0.0.1", "--port", "8000"),
    ]
    for server in servers:
        assert " ".join(server.options) in server.shell
    shares = [float(server.options[-1]) for server in servers]
    assert 0.9 <= sum(shares) <= 0.9 + 3e-4  # weights and caches together; the rest is reserved


def test_what_was_proved_and_what_is_estimated_stay_apart() -> None:
    found = spec()
    assert found.schema_version == 2
    assert (found.manifest, found.proof) == (pools.MANIFEST.digest, pools.proof().digest)
    claims = found.claims
    assert (claims.claimed, claims.verified_disk, claims.verified_memory) == (140_000, 139_000, 135_000)
    assert claims.measured_with == "transformers"
    document = json.loads(found.canonical())
    for part in (document["memory"], *(server["memory"] for server in document["servers"])):
        assert part["estimated"] is True
    assert "not a measurement" in document["memory"]["basis"]
    assert found.canonical().count(b'"basis"') == 1
    assert any("not device memory" in note for note in found.notes)
    server = found.servers[0]
    assert (server.weights, server.steps, server.tasks["t"].merged) == ("w-b", 3, 0.89)
    assert server.original == pools.fingerprint("b").digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"proof": pools.proof(passed=False, problems=("model a: differs", "b: too"))},
            "model a: differs; b: too",
        ),
        ({"proof": pools.proof(manifest="0" * 64)}, "the proof is of another export"),
        (
            {"holdouts": {n: pools.holdout(n).model_copy(update={"weights": "other"}) for n in "abc"}},
            "the export holds w-a, the holdout scored other",
        ),
        (
            {"fingerprints": {n: pools.fingerprint(n, "F64") for n in "abc"}},
            "vLLM does not serve weights in F64",
        ),
    ],
)
def test_nothing_unproved_is_deployed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProofError, match=message):
        spec(**changes)


def with_residuals() -> Manifest:
    layer = pools.MANIFEST.models["a"]
    factors = {f"base_model.model.up.lora_{x}.weight": pools.tensor(x, 5, "private") for x in "AB"}
    models = pools.MANIFEST.models | {"a": layer.model_copy(update={"tensors": layer.tensors | factors})}
    return pools.MANIFEST.model_copy(update={"models": models})


def shared(device: str = "1MB", **changes: Any) -> DeploymentSpec:
    return spec(pool=pools.pool(device, plugin=True), **changes)


def test_with_the_plugin_the_cache_takes_the_room_that_sharing_frees() -> None:
    found = shared()
    assert found.plugin and not spec().plugin
    server = found.servers[0]
    at = server.options.index("--quantization")
    assert server.options[at : at + 4] == PLUGIN == ("--quantization", "sandhi", "--load-format", "sandhi")
    assert server.memory.after.kv_bytes == 173_333  # (1000 - 100 - 380) / 3
    assert server.options[-4:] == ("--kv-cache-memory-bytes", "173333", "--gpu-memory-utilization", "0.3734")
    assert any("refuses to start rather than copy" in note for note in found.notes)
    assert [server.metrics for server in found.servers] == ["/metrics"] * 3


@pytest.mark.parametrize("device", ["0.43MB", "0.5MB", "1MB", "20MB"])
def test_with_the_plugin_vllm_has_room_for_what_is_its_own(device: str) -> None:
    """vLLM's own arithmetic on a GPU (request_memory in vllm/v1/worker/utils.py, 0.32), with every server's shared
    tensors in an owner's memory and those before it running."""
    found = shared(device)
    total = found.memory.device_bytes
    free = total - (30 + 80) * pools.KB  # what the owner holds: embed and up
    for server in found.servers:
        given = dict(pairwise(server.options))
        requested = math.ceil(total * float(given["--gpu-memory-utilization"]))
        engine = requested - server.memory.shared_bytes  # what the loader's get_external_weight_memory says
        own = server.memory.private_bytes + int(given["--kv-cache-memory-bytes"])
        assert 0 < own <= engine <= free
        free -= own


def test_with_the_plugin_a_pool_that_fits_when_shared_is_served() -> None:
    assert all("--kv-cache-memory-bytes" in server.options for server in shared("0.5MB").servers)
    found = shared("0.4MB")
    assert not any("--kv-cache-memory-bytes" in server.options for server in found.servers)
    assert any("even with shared tensors held once, 20000 bytes missing" in note for note in found.notes)


def test_the_plugin_applies_residuals() -> None:
    manifest = with_residuals()
    found = shared(manifest=manifest, proof=pools.proof(manifest=manifest.digest))
    assert {server.engine for server in found.servers} == {"vllm"}


def library(**changes: Any) -> DeploymentSpec:
    deploy = DeploySettings(engine="transformers", device_memory="1MB")
    return spec(pool=pools.pool().model_copy(update={"deploy": deploy}), **changes)


def test_residuals_are_not_served_by_stock_vllm() -> None:
    manifest = with_residuals()
    proof = pools.proof(manifest=manifest.digest)
    with pytest.raises(
        ProofError, match=r"model a: adds residuals .* which vllm without the plugin does not apply"
    ) as caught:
        spec(manifest=manifest, proof=proof)
    assert "deploy.engine to transformers" in caught.value.problem.remedy
    assert [server.model for server in library(manifest=manifest, proof=proof).servers] == ["a", "b", "c"]


def test_a_model_may_be_served_by_another_engine_than_the_pools() -> None:
    found, alone = spec(pool=pools.pool(plugin=True, a="transformers")), shared()
    assert found.engine == "vllm" and found.plugin
    assert [(s.model, s.engine, s.port) for s in found.servers] == [
        ("b", "vllm", 8000),
        ("a", "transformers", None),
        ("c", "vllm", 8002),  # its place
    ]
    assert [found.servers[at] for at in (0, 2)] == [alone.servers[at] for at in (0, 2)]
    assert (found.servers[1].options, found.servers[1].metrics) == ((), None)
    assert found.notes[0] == "b, c, served by vllm:" and found.notes[1:-3] == alone.notes
    assert found.notes[-3:] == ("a, served by transformers:", *library().notes)
    # The other way round vLLM has its plugin too.
    deploy = DeploySettings(engine="transformers", device_memory="1MB")
    other = spec(pool=pools.pool(b="vllm").model_copy(update={"deploy": deploy}))
    assert (other.engine, other.plugin, other.servers[0]) == ("transformers", True, alone.servers[0])
    assert {server.engine for server in other.servers[1:]} == {"transformers"}


def test_residuals_are_refused_of_models_that_stock_vllm_serves() -> None:
    manifest = with_residuals()
    given = {"manifest": manifest, "proof": pools.proof(manifest=manifest.digest)}
    found = {server.model: server.engine for server in spec(pool=pools.pool(a="transformers"), **given).servers}
    assert found == {"a": "transformers", "b": "vllm", "c": "vllm"}
    with pytest.raises(ProofError, match=r"model a: adds residuals .* which vllm without the plugin does not apply"):
        spec(pool=pools.pool(b="transformers"), **given)


@pytest.mark.parametrize("stored", DTYPE_BYTES)
def test_the_library_serves_whatever_dtype_the_files_have(stored: str) -> None:
    found = library(fingerprints={name: pools.fingerprint(name, stored) for name in "abc"})
    assert {server.dtype for server in found.servers} == {str(DTYPES[stored]).removeprefix("torch.")}


@pytest.mark.parametrize("deployed", [spec, library])
def test_a_dtype_that_no_pool_has_is_refused_by_either_engine(deployed: Callable[..., DeploymentSpec]) -> None:
    with pytest.raises(ProofError, match=r"model a: .*weights in F8_E4M3"):
        deployed(fingerprints={name: pools.fingerprint(name, "F8_E4M3") for name in "abc"})


def test_the_librarys_command_runs_where_there_is_no_python_without_a_number() -> None:
    """As on Debian outside of virtual environments; and wherever the package can be imported, installed or not."""
    server = library().servers[0]
    command = shlex.split(server.shell)
    assert command == ["python3", "-m", "sandhi_core.serving.look", "/srv/exports/p q/b"] and server.port is None
    assert server.metrics is None and not library().plugin
    assert importlib.util.find_spec(command[2]) is not None


def test_a_pool_that_only_fits_when_shared_is_not_promised_to_stock_vllm() -> None:
    found = spec(pool=pools.pool("0.5MB"))
    assert (found.memory.fits_before, found.memory.fits_after) == (False, True)
    assert any("70000 bytes missing" in note for note in found.notes)  # 520 + 50 reserved - 500
    for server in found.servers:
        assert server.options[-2:] == ("--max-model-len", "1024")


def test_a_cache_smaller_than_the_context_shortens_it() -> None:
    config = pools.CONFIG | {"max_position_embeddings": 131_072}
    server = spec(configs=dict.fromkeys("abc", config)).servers[0]
    assert server.max_model_len == 3952  # 126666 // 32 tokens in whole blocks of 16
    assert any("limited to 3952 of 131072" in note for note in server.notes)


def test_windows_and_rounding_are_said() -> None:
    config = pools.CONFIG | {
        "model_type": "qwen3",
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 2,
    }
    notes = "\n".join(spec(configs=dict.fromkeys("abc", config)).servers[0].notes)
    assert "2 of 2 layers look back 64 tokens only" in notes
    assert "vllm#39514" in notes
    assert "scored in float32 on a CPU" in notes
    evaluation = pools.pool().evaluation.model_copy(update={"dtype": "bfloat16"})
    assert spec(pool=pools.pool().model_copy(update={"evaluation": evaluation})).servers[0].notes == ()
    assert spec(pool=pools.pool().model_copy(update={"evaluation": evaluation})).rounding == ()
    (once,) = spec().rounding
    assert once in spec().servers[0].notes


def test_the_file_reads_back_and_is_the_same_twice(tmp_path: Path) -> None:
    found = spec()
    path = write_deployment(tmp_path, found)
    first = path.read_bytes()
    assert path == tmp_path / "deployment.json"
    assert DeploymentSpec.parse(first) == found
    assert path.stat().st_mode & 0o777 == 0o444
    assert write_deployment(tmp_path, spec()).read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["deployment.json"]
