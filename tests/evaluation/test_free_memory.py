"""What hidden states may take, by device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sandhi_core.evaluation import free_memory
from sandhi_core.evaluation.free_memory import cache_bytes
from sandhi_core.pools.pool import EvaluationSettings


def settings(**given: Any) -> EvaluationSettings:
    return EvaluationSettings.model_validate(given)


def test_what_is_set_is_taken_where_models_are_scored() -> None:
    assert cache_bytes(settings(device="cpu", cache_memory="3MiB")) == {"cpu": 3 << 20}
    assert cache_bytes(settings(device="cuda:1", cache_memory="3MiB")) == {"cuda:1": 3 << 20}


def test_a_quarter_of_what_is_free_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    free = cache_bytes(settings(device="cpu"))
    assert set(free) == {"cpu"} and 0 < free["cpu"] < 1 << 50
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 9000))
    found = cache_bytes(settings(device="cuda"))
    assert list(found) == ["cuda", "cpu"] and found["cuda"] == 1000 and found["cpu"] > 0


def test_pages_of_files_are_left_to_a_control_group(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "990\n",
        "memory.stat": "anon 90\nfile 900\ninactive_file 600\nactive_file 250\nslab 0\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert free_memory._left_to_group(tmp_path) == 860
    (tmp_path / "memory.max").write_text("max\n")
    with pytest.raises(ValueError):
        free_memory._left_to_group(tmp_path)


def test_a_system_that_does_not_say_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert cache_bytes(settings(device="mps")) == {"mps": 0, "cpu": 0}
