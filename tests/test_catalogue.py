"""Pool files as a catalogue: all of them, or those that can be used."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sandhi_core.catalogue import load_catalogue, load_usable
from sandhi_core.errors import PoolError


def write(folder: Path, name: str, pool: str = "", **sections: Any) -> Path:
    tasks = [{"task": "letters", "metric": "acc", "budget": 0.2}]
    models = [{"name": "a", "path": "/models/a", "tasks": tasks}]
    file = folder / name
    file.write_text(yaml.safe_dump({"name": pool or file.stem, "models": models, **sections}))
    return file


def test_a_pool_file_that_cannot_be_used_holds_up_no_other(tmp_path: Path) -> None:
    good = [write(tmp_path, "good.yaml"), write(tmp_path, "other.yaml")]
    bad = {
        write(tmp_path, "bad.yaml", nonsense=1): "nonsense",
        write(tmp_path, "same.yaml", pool="good"): "two pool files define a pool named 'good'",
        write(tmp_path, "unlike.yaml", evaluation={"seed": 7}): "'a' is defined differently in pools 'good' and 'unlik",
        tmp_path / "gone.yaml": "cannot be read",
    }
    catalogue, refused = load_usable([*good, *bad])
    assert list(catalogue.pools) == ["good", "other"]
    assert len(refused) == len(bad)
    for file, told in bad.items():
        assert any(told in str(error) for error in refused)
        with pytest.raises(PoolError, match=told):
            load_catalogue([*good, file])
