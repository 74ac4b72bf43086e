"""What the plugin cannot serve is told before an engine starts: all of it, each with a remedy."""

from typing import Any

import pytest

from sandhi_core.deploy.vllm import heads_beyond_cpu
from sandhi_core.errors import PreflightError, UsageError
from sandhi_core.records import ExportedTensor
from sandhi_core.serving.vllm_plugin.refuse import EXTRAS, EngineSettings, Options, problems, require_servable

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "vocab_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": None,
}


def tensor(dtype: str = "BF16") -> ExportedTensor:
    return ExportedTensor(digest="0" * 64, dtype=dtype, shape=(2, 2), nbytes=8, file="f.safetensors", sharing="merged")


def told(engine: EngineSettings, config: dict[str, Any] = CONFIG, **dtypes: str) -> list[tuple[str, str]]:
    tensors = {name: tensor(dtype) for name, dtype in (dtypes or {"w": "BF16"}).items()}
    found = problems("legal", config, tensors, engine)
    assert all(problem.model == "legal" and problem.code == "vllm" for problem in found)
    return [(problem.message, problem.remedy) for problem in found]


@pytest.mark.parametrize(
    "engine",
    [
        EngineSettings(),
        EngineSettings(tensor_parallel=2),
        EngineSettings(tensor_parallel=4),  # each head of keys on two ranks
        EngineSettings(device="cuda", options=Options(owner="/run/sandhi.sock")),
        EngineSettings(device="cuda", tensor_parallel=2, options=Options(owner="/run/sandhi-{rank}.sock")),
    ],
)
def test_what_can_be_served_is_not_refused(engine: EngineSettings) -> None:
    assert told(engine) == []
    require_servable("legal", CONFIG, {"w": tensor()}, engine)


@pytest.mark.parametrize(
    ("engine", "message", "remedy"),
    [
        (EngineSettings(quantization=None), "--quantization is None", "give both"),
        (EngineSettings(quantization="fp8"), "--quantization is fp8", "give both"),
        (EngineSettings(load_format="auto"), "--load-format is auto", "give both"),
        (EngineSettings(pipeline_parallel=2), "pipeline parallelism", "--tensor-parallel-size"),
        (EngineSettings(device="xpu"), "not on xpu", "on one of these"),
        (EngineSettings(device="cuda"), "a process of their own", "sandhi_core.serving.cuda.owner"),
        (EngineSettings(options=Options(owner="/s")), "an owner is named", "leave owner out"),
        (
            EngineSettings(device="cuda", tensor_parallel=2, options=Options(owner="/s")),
            "2 ranks need an owner each",
            "put {rank} into the path",
        ),
        (EngineSettings(dtype="float32"), "is BF16 like 0 others, the engine computes in float32", "--dtype bfloat16"),
        (
            EngineSettings(tensor_parallel=3),
            "its 4 attention heads cannot be divided among 3",
            "number of ranks that divides it",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_remedy(engine: EngineSettings, message: str, remedy: str) -> None:
    first = told(engine)[0]
    assert message in first[0] and remedy in first[1]


def test_everything_is_told_at_once() -> None:
    engine = EngineSettings(dtype="float16", pipeline_parallel=2, extras=frozenset(EXTRAS))
    assert len(told(engine)) == 2 + len(EXTRAS)
    with pytest.raises(PreflightError) as raised:
        require_servable("legal", CONFIG, {"w": tensor()}, engine)
    assert len(raised.value.problems) == 2 + len(EXTRAS)


def test_tensors_are_told_once_for_each_dtype() -> None:
    found = told(EngineSettings(), a="F32", b="BF16", c="F32", d="F64")
    assert [remedy for _, remedy in found] == ["give --dtype float32", "serve it with transformers"]


def test_weights_that_are_quantized_are_refused() -> None:
    (found,) = told(EngineSettings(), CONFIG | {"quantization_config": {"quant_method": "awq"}})
    assert "quantized already (awq)" in found[0]


def test_options_are_read() -> None:
    assert Options.of({}) == Options("sampled", None)
    assert Options.of({"digests": "full", "owner": "/s"}) == Options("full", "/s")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"digest": "full"}, "unknown option of the loader: digest"),
        ({"digests": "most"}, "digests is 'most', not full, sampled or off"),
        ({"digests": ["full"]}, "digests is"),
        ({"owner": ""}, "owner is ''"),
        ({"owner": 3}, "owner is 3"),
    ],
)
def test_options_that_are_none_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match="give --model-loader-extra-config") as raised:
        Options.of(given)
    assert message in raised.value.problem.message


def test_heads_that_vllm_does_not_take_on_a_cpu() -> None:
    """They would fail at the first request; on a GPU they are served."""
    ((message, remedy),) = told(EngineSettings(), CONFIG | {"head_dim": 24})
    assert message == "its heads have 24 elements, which vLLM's attention does not take on a CPU"
    assert "--engine transformers" in remedy
    assert told(EngineSettings(device="cuda", options=Options(owner="/s")), CONFIG | {"head_dim": 24}) == []
    assert heads_beyond_cpu({"text_config": CONFIG}) is None and heads_beyond_cpu({}) is None
    assert heads_beyond_cpu({"text_config": CONFIG | {"head_dim": 40}}) == 40
