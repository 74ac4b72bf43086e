import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sandhi_core.profile as module
from sandhi_core.pools.pool import ProfileSettings
from sandhi_core.profile import noisy, profile
from sandhi_core.records import Evaluation
from tests.synthetic import evaluation, fingerprint

NAMES: dict[str, Any] = {
    "seed": 1234,
    "fingerprint": "f",
    "layer": 3,
    "component": "mlp",
    "projection": "up",
    "mean": 0.25,
    "std": 0.5,
}


def test_half_of_the_result_is_noise_of_the_given_statistics() -> None:
    weights = torch.zeros(300, 400)
    noise = noisy(weights, **NAMES) * 2
    assert noise.mean() == pytest.approx(0.25, abs=0.005) and noise.std() == pytest.approx(0.5, abs=0.005)
    shifted = noisy(weights + 3.0, **NAMES)
    assert torch.allclose(shifted, noise / 2 + 1.5, atol=1e-6)
    assert not weights.any()


def test_the_noise_is_the_documented_generator() -> None:
    key = hashlib.sha256(b"1234\nf\n3\nmlp\nup").digest()[:16]
    draw = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    z = draw.standard_normal(12, dtype=np.float32).reshape(3, 4)
    expected = (z * np.float32(0.5) + np.float32(0.25)) / np.float32(2)
    assert np.array_equal(noisy(torch.zeros(3, 4), **NAMES).numpy(), expected)


@pytest.mark.parametrize("change", [{"seed": 1}, {"fingerprint": "g"}, {"layer": 4}, {"projection": "gate"}])
def test_every_name_counts_and_nothing_else_does(change: dict[str, Any]) -> None:
    weights = torch.zeros(8, 8)
    assert torch.equal(noisy(weights, **NAMES), noisy(weights, **NAMES))
    assert not torch.equal(noisy(weights, **NAMES), noisy(weights, **(NAMES | change)))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_bytes_do_not_depend_on_chunks_or_layout(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(13, 17, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = noisy(weights, **NAMES)
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert torch.equal(noisy(weights, **NAMES), whole)
    assert torch.equal(noisy(torch.cat([weights, weights], 1)[:, 17:], **NAMES), whole)
    assert whole.dtype == torch.bfloat16 and whole.shape == weights.shape


class FakeCheckpoint:
    def tensor(self, name: str) -> Tensor:
        return torch.ones(4, 4) * len(name)


def layer_of(names: Iterable[str]) -> int:
    (layer,) = {int(name.split(".")[2]) for name in names}
    return layer


class FakeEvaluator:
    """0.9 for the original; noise costs a hundredth a layer, twice that in attention, 0.002 more or less a
    seed."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, frozenset[str]]] = []

    def evaluate(self, split: str, weights: Any) -> Evaluation:
        assert split == "profile"
        replaced: Mapping[str, Tensor] = {name: weights.read(name) for name in weights.tensors}
        self.asked.append((weights.key, frozenset(replaced)))
        if not replaced:
            return evaluation({"task": 0.9, "other": 0.5})
        attention = any(".q_proj" in name for name in replaced)
        seed = 0.002 if len(self.asked) % 2 else -0.002
        cost = 0.01 * (layer_of(replaced) + 1) * (2 if attention else 1) + seed
        return evaluation({"task": 0.9 - cost, "other": 0.6})


def test_profile_scores_every_component_from_the_top_down() -> None:
    model = fingerprint("a", 3)
    evaluator = FakeEvaluator()
    found = profile("a", model, FakeCheckpoint(), evaluator, ProfileSettings(seeds=(1, 2)))  # type: ignore[arg-type]
    assert found.fingerprint == model.digest and found.seeds == (1, 2)
    assert found.baseline == {"task": 0.9, "other": 0.5} and found.questions == {"task": 100, "other": 100}
    assert [(s.layer, s.component) for s in found.sensitivities] == [(n, c) for n in range(3) for c in ("attn", "mlp")]
    assert [s.drop for s in found.sensitivities] == pytest.approx([0.02, 0.01, 0.04, 0.02, 0.06, 0.03])
    keys = [key for key, *_ in evaluator.asked]
    assert len(keys) == len(set(keys)) == 1 + 3 * 2 * 2
    layers = [layer_of(names) for _, names in evaluator.asked[1:]]
    assert layers == sorted(layers, reverse=True)
    first = evaluator.asked[1][1]
    assert first == {f"model.layers.2.{p}_proj.weight" for p in "qkvo"}


def test_drop_is_that_of_the_worst_task_and_may_be_a_gain() -> None:
    class Gains(FakeEvaluator):
        def evaluate(self, split: str, weights: Any) -> Evaluation:
            return evaluation({"task": 0.95} if weights.tensors else {"task": 0.9})

    found = profile("a", fingerprint("a", 1), FakeCheckpoint(), Gains(), ProfileSettings())  # type: ignore[arg-type]
    assert [s.drop for s in found.sensitivities] == pytest.approx([-0.05, -0.05])
