"""What the memory of an export is proved with."""

import sys

import pytest

from assets.sharing_proof import proving
from assets.verdicts import measured_as_deployed
from sandhi_core.pool import Adapters, DeploySettings
from sandhi_core.serving.engines import PYTHON


def test_a_proof_measures_with_vllm_only_where_it_is_deployed_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    vllm = DeploySettings(engine="vllm")
    assert proving(vllm) == ("transformers", "")
    monkeypatch.setenv(PYTHON, sys.executable)
    assert proving(vllm) == ("vllm", sys.executable)
    assert proving(DeploySettings(engine="vllm", plugin=False)) == ("transformers", "")
    assert proving(DeploySettings(engine="transformers")) == ("transformers", "")
    assert proving(DeploySettings(engine="vllm", adapters=Adapters())) == ("transformers", "")


def test_a_proof_with_another_engine_than_the_deployed_one_is_a_warning() -> None:
    vllm = DeploySettings(engine="vllm")
    other = measured_as_deployed(vllm, "transformers")
    assert not other.passed and other.warning
    assert "measured with transformers, the pool is deployed on vLLM" in other.description
    assert PYTHON in other.description
    assert measured_as_deployed(vllm, "vllm").passed
    for settings in (DeploySettings(engine="transformers"), DeploySettings(engine="vllm", plugin=False)):
        assert measured_as_deployed(settings, "transformers").passed
