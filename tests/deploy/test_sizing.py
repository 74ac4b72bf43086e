"""Memory figures add up, and sharing never costs cache."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.deploy.sizing import memory_of
from tests.deploy.pools import CONFIG, DEVICE, KB, MANIFEST, TOKEN, exported, tensor

CONFIGS: dict[str, Any] = dict.fromkeys("abc", CONFIG)
DTYPES = dict.fromkeys("abc", "BF16")


def test_every_figure_by_hand() -> None:
    pool, models = memory_of(DEVICE, MANIFEST, CONFIGS, DTYPES)
    assert (pool.weights_bytes_before, pool.weights_bytes_after, pool.reserve_bytes) == (
        520 * KB,
        380 * KB,
        100 * KB,
    )
    assert {name: m.weights_bytes // KB for name, m in models.items()} == {"a": 190, "b": 200, "c": 130}
    assert {name: m.shared_bytes // KB for name, m in models.items()} == {"a": 110, "b": 110, "c": 30}
    share_before, share_after = 380 * KB // 3, 520 * KB // 3  # 1000 - 100 - weights, a third each
    for model in models.values():
        assert model.kv.bytes_per_token == TOKEN == 32
        assert (model.before.kv_bytes, model.after.kv_bytes) == (share_before, share_after)
        assert (model.before.kv_tokens, model.after.kv_tokens) == (share_before // 32, share_after // 32)
        assert model.more_kv_tokens == share_after // 32 - share_before // 32 == 1458
        assert model.estimated
    assert "not a measurement" in pool.basis
    assert pool.more_kv_tokens == 3 * 1458
    assert pool.kv_tokens_after - pool.kv_tokens_before == pool.more_kv_tokens


def test_a_tied_head_is_no_second_copy() -> None:
    def model(name: str) -> Any:
        tensors = {
            "model.embed_tokens.weight": tensor("e", 30, "duplicate"),
            "lm_head.weight": tensor("e", 30, "duplicate"),
            "up": tensor(name, 50, "private"),
        }
        return exported(name, tensors)

    manifest = MANIFEST.model_copy(update={"models": {name: model(name) for name in "ab"}})
    tied, _ = memory_of(DEVICE, manifest, dict.fromkeys("ab", CONFIG | {"tie_word_embeddings": True}), DTYPES)
    assert (tied.weights_bytes_before, tied.weights_bytes_after) == (160 * KB, 130 * KB)
    untied, _ = memory_of(DEVICE, manifest, dict.fromkeys("ab", CONFIG), DTYPES)
    assert (untied.weights_bytes_before, untied.weights_bytes_after) == (220 * KB, 160 * KB)


def test_where_weights_do_not_fit_there_is_no_cache() -> None:
    pool, models = memory_of(500 * KB, MANIFEST, CONFIGS, DTYPES)
    assert (pool.fits_before, pool.fits_after) == (False, True)
    assert all(model.before.kv_tokens == 0 < model.after.kv_tokens for model in models.values())


@settings(deadline=None)
@given(
    device=st.integers(1, 10**7),
    shared=st.lists(st.tuples(st.sampled_from("uvw"), st.integers(1, 50)), max_size=4, unique_by=lambda s: s[0]),
    own=st.lists(st.integers(1, 200), min_size=1, max_size=4),
)
def test_sharing_never_costs_cache(device: int, shared: list[tuple[str, int]], own: list[int]) -> None:
    names = [f"m{i}" for i in range(len(own))]
    manifest = MANIFEST.model_copy(
        update={
            "models": {
                name: exported(
                    name,
                    {"own": tensor(name, kb, "private")} | {d: tensor(d, size, "merged") for d, size in shared},
                )
                for name, kb in zip(names, own, strict=True)
            }
        }
    )
    pool, models = memory_of(device, manifest, dict.fromkeys(names, CONFIG), dict.fromkeys(names, "BF16"))
    once = sum(size for _, size in shared) * KB
    assert pool.weights_bytes_before - pool.weights_bytes_after == once * (len(names) - 1)
    assert pool.more_kv_tokens >= 0
    assert all(model.more_kv_tokens >= 0 for model in models.values())
    for fits, weights, side in (
        (pool.fits_before, pool.weights_bytes_before, "before"),
        (pool.fits_after, pool.weights_bytes_after, "after"),
    ):
        cache = sum(getattr(model, side).kv_bytes for model in models.values())
        assert weights + pool.reserve_bytes + cache <= device if fits else cache == 0


@pytest.mark.parametrize("missing", ["a", "b", "c"])
def test_two_tensors_of_one_digest_under_two_names_are_two(missing: str) -> None:
    """An index of shards cannot say that one is the other."""
    models = dict(MANIFEST.models)
    moved = {f"{name}-renamed": value for name, value in models[missing].tensors.items()}
    models[missing] = models[missing].model_copy(update={"tensors": moved})
    pool, _ = memory_of(DEVICE, MANIFEST.model_copy(update={"models": models}), CONFIGS, DTYPES)
    lost = {"a": 110, "b": 110, "c": 30}[missing]
    assert pool.weights_bytes_after == (380 + lost) * KB


def test_residuals_are_kept_by_servers_that_share_and_in_no_checkpoint() -> None:
    layer = exported("a", {"m.weight": tensor("u", 80, "merged"), "rest": tensor("r", 40, "private")})
    factors = {f"base_model.model.m.lora_{x}.weight": tensor(x, 5, "private") for x in "AB"}
    adjusted = layer.model_copy(update={"tensors": layer.tensors | factors})
    manifest = MANIFEST.model_copy(update={"models": {"a": adjusted, "b": layer}})
    pool, models = memory_of(DEVICE, manifest, CONFIGS, DTYPES)
    assert (pool.weights_bytes_before, pool.weights_bytes_after) == (240 * KB, 170 * KB)
    assert (models["a"].weights_bytes, models["a"].private_bytes, models["a"].shared_bytes) == (130000, 50000, 80000)
    assert models["b"].weights_bytes == 120 * KB
