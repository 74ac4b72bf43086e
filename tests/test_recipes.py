"""Shared tensors made ahead, several at once: the same files as one after another, and the first error of them."""

from pathlib import Path

import pytest
import torch

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import MergeError
from sandhi_core.recipes import SharedTensors
from sandhi_core.records import Contributor, Fingerprint, Recipe
from sandhi_core.rungs.grams import Gram
from sandhi_core.store import Store
from tests.models import tiny_llama

Opened = dict[str, tuple[Checkpoint, Fingerprint]]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scans")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, scans: Path) -> Opened:
    folder = tmp_path_factory.mktemp("models")
    found = {name: Checkpoint.open(tiny_llama(folder / name, seed), name) for seed, name in enumerate("ab")}
    return {name: (checkpoint, fingerprint(checkpoint, scans)) for name, checkpoint in found.items()}


def recipes(opened: Opened) -> list[Recipe]:
    """The mean of every projection, but one has its rows rescaled and one is taken as it is; one is asked for twice."""
    a, b = ({t.name: t for t in found.tensors} for _, found in opened.values())
    made = []
    for at, slot in enumerate(opened["a"][1].slots):
        name = slot.tensor
        own = [Contributor(model=m, layer=0, tensor=name, digest=of[name].digest) for m, of in (("a", a), ("b", b))]
        made.append(
            Recipe(
                projection=slot.projection,
                shape=a[name].shape,
                dtype=a[name].dtype,
                method="member" if at == 1 else "mean",
                rescale="common" if at == 0 else "none",
                contributors=tuple(own[:1] if at == 1 else own),
            )
        )
    return [*made, made[2]]


def no_gram(contributor: Contributor) -> Gram:
    raise ValueError(f"moments of {contributor.tensor}")


def files(store: Path) -> dict[str, bytes]:
    return {p.relative_to(store).as_posix(): p.read_bytes() for p in store.rglob("*") if p.is_file()}


def shared(root: Path, scans: Path, opened: Opened) -> SharedTensors:
    return SharedTensors(Store(root), scans, lambda model: opened[model], no_gram)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_files_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, scans: Path, opened: Opened, threads: int
) -> None:
    made, before = recipes(opened), torch.get_num_threads()
    one_by_one = [shared(tmp_path / "one", scans, opened).digest(recipe) for recipe in made]
    try:
        torch.set_num_threads(threads)
        shared(tmp_path / "ahead", scans, opened).prepare(made)
    finally:
        torch.set_num_threads(before)
    assert files(tmp_path / "ahead") == files(tmp_path / "one")
    nothing = SharedTensors(Store(tmp_path / "ahead"), scans, {}.__getitem__, no_gram)  # would have to open a model
    nothing.prepare(made)
    assert [nothing.digest(recipe) for recipe in made] == one_by_one


def test_what_needs_moments_is_not_made_ahead(tmp_path: Path, scans: Path, opened: Opened) -> None:
    weighted = [r.model_copy(update={"method": "regmean"}) for r in recipes(opened) if len(r.contributors) == 2]
    shared(tmp_path / "store", scans, opened).prepare(weighted)
    assert not (tmp_path / "store").exists()


def test_the_first_contributor_that_changed_is_named(tmp_path: Path, scans: Path, opened: Opened) -> None:
    made = recipes(opened)
    for at in (3, 6):
        first, *others = made[at].contributors
        changed = first.model_copy(update={"digest": "0" * 64})
        made[at] = made[at].model_copy(update={"contributors": (changed, *others)})
    with pytest.raises(MergeError, match="checkpoint changed") as caught:
        shared(tmp_path / "store", scans, opened).prepare(made)
    assert caught.value.problem.tensor == made[3].contributors[0].tensor
    assert not list((tmp_path / "store").rglob(".*"))
