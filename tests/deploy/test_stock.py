"""Adapters in a deployment: one server a base, sizes that add up, and everything derived again when it is verified."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from sandhi_core.deploy import vllm
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.deploy.stock import lora_rank
from sandhi_core.layout import DEPLOYMENT
from sandhi_core.pools.pool import LoraRank
from sandhi_core.verification.exports import verify
from tests.adapted import ADAPTED, adapted_case
from tests.deployed import deployed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return deployed(adapted_case(tmp_path))


def spec(root: Path) -> DeploymentSpec:
    return DeploymentSpec.parse((root / DEPLOYMENT).read_bytes())


def test_one_command_serves_a_base_and_its_adapters_by_their_names(root: Path) -> None:
    found = spec(root)
    (base,) = found.bases
    assert tuple(model.model for model in base.models) == ADAPTED
    command = shlex.split(base.shell)
    assert command[2:7] == [vllm.MODULE, "--model", str(root / base.base), "--served-model-name", "cat"]
    assert command[9:14] == ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    at = command.index("--lora-modules")
    assert command[at + 1 : at + 3] == [f"{n}={root / f'{n}.adapter'}" for n in ("ann", "ben")]
    start = command.index("--lora-target-modules") + 1
    modules = command[start : command.index("--max-model-len")]
    assert modules and all(module.endswith("_proj") for module in modules) and modules == sorted(modules)
    assert any("bfloat16 and float16 only" in note for note in base.notes)  # these models are float32


def test_whatever_is_no_adapter_is_served_by_what_applies_its_residuals(root: Path) -> None:
    found = spec(root)
    assert {s.model: s.engine for s in found.servers} == {"dot": "transformers", "eve": "transformers", "far": "vllm"}
    ports = [base.port for base in found.bases] + [s.port for s in found.servers if s.port is not None]
    assert len(set(ports)) == len(ports)
    assert found.stock is not None and sorted(found.stock.ordinary) == ["dot", "eve", "far"]
    assert found.notes[0].startswith("3 of 6 models are adapters of one base")


def test_with_the_plugin_it_is_vllm_and_bases_stay_stock(tmp_path: Path) -> None:
    case = adapted_case(tmp_path)
    case.pool = case.pool.model_copy(update={"deploy": case.pool.deploy.model_copy(update={"plugin": True})})
    root = deployed(case)
    found = spec(root)
    assert {server.engine for server in found.servers} == {"vllm"} and verify(root)[1]
    assert all("--quantization" in server.options for server in found.servers)
    assert [base.metrics for base in found.bases] == ["/metrics"] and "--quantization" not in found.bases[0].options
    assert found.stock_memory is not None
    for server in found.servers:  # what these share is not taken off beside bases
        at = server.options.index("--kv-cache-memory-bytes")
        assert server.options[at + 1] == str(found.stock_memory.share_bytes)


def test_the_base_is_counted_once_and_buffers_for_every_adapter(root: Path) -> None:
    found = spec(root)
    assert found.stock_memory is not None
    (base,) = found.bases
    sizes = {s.model: s.memory.weights_bytes for s in found.servers}
    manifest = json.loads((root / "sandhi.json").read_text())
    held = manifest["models"]["cat"]["tensors"]
    assert base.memory.weights_bytes == sum(t["nbytes"] for t in held.values())
    at = base.options.index("--lora-target-modules")
    adapted = {m for m in base.options[at:] if m.endswith("_proj")}
    for together in ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}):
        adapted |= together if adapted & together else set()
    wide = sum(sum(t["shape"]) for n, t in held.items() if n.split(".")[-2] in adapted)
    assert base.memory.adapter_bytes == 2 * 8 * wide * 4  # adapters, rank, float32
    assert found.stock_memory.weights_bytes == base.memory.weights_bytes + base.memory.adapter_bytes + sum(
        sizes.values()
    )
    share = found.stock_memory.share_bytes
    assert base.memory.capacity.kv_bytes == 3 * share
    everything = found.stock_memory.weights_bytes + found.stock_memory.reserve_bytes + 6 * share
    assert 0 <= found.stock_memory.device_bytes - everything < 6
    (far,) = (s for s in found.servers if s.model == "far")
    assert far.options[far.options.index("--kv-cache-memory-bytes") + 1] == str(share)


@pytest.mark.parametrize("rank", range(1, 512, 7))
def test_the_largest_rank_is_the_smallest_that_vllm_takes(rank: int) -> None:
    allowed = get_args(LoraRank)
    assert lora_rank(rank) == min(a for a in allowed if a >= rank)


def test_a_sound_deployment_is_verified(root: Path) -> None:
    table, ok = verify(root)
    assert ok and table["problems"] == []


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "stock.max_rank": lambda d: d["stock"].update(max_rank=8),
    "stock.ordinary.dot.count": lambda d: d["stock"]["ordinary"]["dot"].update(count=2),
    "stock_memory.weights_bytes": lambda d: d["stock_memory"].update(weights_bytes=1),
    "bases.*.options": lambda d: d["bases"][0]["options"].__setitem__(1, "other"),
    "bases.*.memory.adapter_bytes": lambda d: d["bases"][0]["memory"].update(adapter_bytes=1),
    "bases.*.models": lambda d: d["bases"][0]["models"][0].update(rank=1),
    "servers.dot.engine": lambda d: next(s for s in d["servers"] if s["model"] == "dot").update(engine="vllm"),
}


@pytest.mark.parametrize("where", EDITS)
def test_every_figure_of_it_follows_from_the_export(root: Path, where: str) -> None:
    path = root / DEPLOYMENT
    document = json.loads(path.read_text())
    base = document["bases"][0]["base"]
    EDITS[where](document)
    path.unlink()
    path.write_text(json.dumps(document))
    table, ok = verify(root)
    assert not ok
    assert [p["message"].split(" is ")[0] for p in table["problems"]] == [where.replace("*", base)]


def test_a_model_that_nothing_serves_is_missed(root: Path) -> None:
    path = root / DEPLOYMENT
    document = json.loads(path.read_text())
    document["bases"][0]["models"].pop()
    path.unlink()
    path.write_text(json.dumps(document))
    table, ok = verify(root)
    assert not ok and "serves ann, ben, dot, eve, far; the export holds" in table["problems"][0]["message"]
