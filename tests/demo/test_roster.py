"""What is trained can be served."""

from demo.roster import SIZES

VLLM = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}
"""Head sizes of vLLM's attention on CPUs (vllm/v1/attention/backends/cpu_attn.py, 0.32)."""


def test_vllm_serves_every_model_of_the_demo() -> None:
    for model in SIZES["demo"].models:
        queries, keys = model.heads
        assert queries % keys == 0 and model.hidden % queries == 0
        assert model.hidden // queries in VLLM, model.name
