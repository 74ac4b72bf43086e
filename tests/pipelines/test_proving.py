"""What the memory of an export is proved with."""

import sys
from typing import Any

import pytest

from assets.sharing_proof import proving
from assets.verdicts import measured_as_deployed
from sandhi_core.pools.pool import Adapters, DeploySettings, Engine, Pool
from sandhi_core.serving.engines import PYTHON
from tests.deploy import pools


def pool(engines: dict[str, Engine] | None = None, **deploy: Any) -> Pool:
    return pools.pool(**(engines or {})).model_copy(update={"deploy": DeploySettings(**deploy)})


def every(engine: Engine) -> dict[str, Engine]:
    return dict.fromkeys("abc", engine)


def test_a_proof_measures_with_vllm_only_where_it_is_deployed_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    mixed = pool({"b": "transformers"})
    assert proving(pool(engine="vllm")) == proving(mixed) == (every("transformers"), "")
    monkeypatch.setenv(PYTHON, sys.executable)
    assert proving(pool(engine="vllm")) == (every("vllm"), sys.executable)
    assert proving(mixed) == ({"a": "vllm", "b": "transformers", "c": "vllm"}, sys.executable)
    assert proving(pool({"b": "vllm"}, engine="transformers")) == (
        {"a": "transformers", "b": "vllm", "c": "transformers"},
        sys.executable,
    )
    assert proving(pool(engine="vllm", plugin=False)) == (every("transformers"), "")
    assert proving(pool(engine="transformers")) == (every("transformers"), "")
    assert proving(pool(engine="vllm", adapters=Adapters())) == (every("transformers"), "")


def test_a_proof_with_another_engine_than_the_deployed_one_is_a_warning() -> None:
    for deployed in (pool(engine="vllm"), pool({"b": "transformers"})):
        other = measured_as_deployed(deployed, every("transformers"))
        assert not other.passed and other.warning
        assert "measured with transformers, the pool is deployed on vLLM" in other.description
        assert PYTHON in other.description
        assert measured_as_deployed(deployed, deployed.engines).passed
    assert "with transformers and vllm" in measured_as_deployed(deployed, deployed.engines).description
    for deployed in (pool(engine="transformers"), pool(engine="vllm", plugin=False)):
        assert measured_as_deployed(deployed, every("transformers")).passed
