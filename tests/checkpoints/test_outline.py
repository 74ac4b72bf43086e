"""A fingerprint from headers: all of the real one that no weight is needed for."""

from pathlib import Path

import pytest

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.outline import outline
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.records import Fingerprint
from tests.models import shard, tiny_llama


def plain(found: Fingerprint) -> object:
    """Without what weights decide."""
    unknown = {"digest", "mean", "std", "constant_rows"}
    return found.model_dump(
        exclude={"rows": True, "tensors": {"__all__": unknown}, "slots": {"__all__": {"digest"}}},
    )


@pytest.mark.parametrize("tied", [True, False])
def test_an_outline_is_the_fingerprint_but_for_the_weights(tmp_path: Path, tied: bool) -> None:
    opened = Checkpoint.open(shard(tiny_llama(tmp_path / "m", tie_word_embeddings=tied)), "m")
    found = outline(opened)
    assert plain(found) == plain(fingerprint(opened, tmp_path / "scans"))
    assert len({t.digest for t in found.tensors}) == len(found.tensors)


def test_no_tensor_is_told_to_be_another_models(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    one, other = (outline(Checkpoint.open(directory, name)) for name in "ab")
    assert not {t.digest for t in one.tensors} & {t.digest for t in other.tensors}
