"""Recipe -> bytes in the store: made once from the contributors' original tensors, then found by digest."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from sandhi_core.checkpoints.checkpoint import Checkpoint, tensor_digest
from sandhi_core.checkpoints.safetensors_file import raw_bytes
from sandhi_core.checkpoints.scan import RowStatistics, row_statistics
from sandhi_core.errors import MergeError
from sandhi_core.graph import STAGES
from sandhi_core.merging import merge
from sandhi_core.records import Contributor, Fingerprint, Recipe, digest_of
from sandhi_core.rungs.grams import Gram
from sandhi_core.store import Store
from sandhi_core.threads import each_on_a_thread

WORKERS = 4
"""Contributors that are held to their digests at once."""


def recipe_key(recipe: Recipe) -> str:
    """By what the store remembers the recipe's tensor. A new version of the stage may give another by the same
    recipe."""
    return digest_of([STAGES["trajectory"].version, recipe.digest])


class SharedTensors:
    """`opened(model)` gives a contributor's checkpoint and fingerprint, `gram(contributor)` the second moments of its
    inputs; `scans` is where row statistics lie."""

    def __init__(
        self,
        store: Store,
        scans: Path,
        opened: Callable[[str], tuple[Checkpoint, Fingerprint]],
        gram: Callable[[Contributor], Gram],
    ) -> None:
        self._store = store
        self._scans = scans
        self._opened = opened
        self._gram = gram

    def prepare(self, recipes: Iterable[Recipe]) -> None:
        """Make what `digest` is going to be asked for: on several threads, one works while another waits for the disk.
        What needs moments of inputs is left to `digest`, since a model may have to answer for them first.

        Raises as `digest` does.
        """
        asked = [r for r in recipes if r.method != "regmean" and self._store.recipe_tensor(recipe_key(r)) is None]
        for model in sorted({c.model for recipe in asked for c in recipe.contributors}):
            self._opened(model)  # opens and keeps, on one thread
        for _ in each_on_a_thread(self.digest, {recipe.digest: recipe for recipe in asked}.values(), writes=True):
            pass

    def digest(self, recipe: Recipe) -> str:
        """The digest of the recipe's tensor, in the store under its first contributor's tensor name.

        Raises MergeError where a contributor's bytes, or the moments that weigh them, are not those the recipe was
        made for.
        """
        key = recipe_key(recipe)
        known = self._store.recipe_tensor(key)
        if known is not None:
            return known
        opened = [self._opened(c.model) for c in recipe.contributors]
        checkpoints = [checkpoint for checkpoint, _ in opened]
        with ThreadPoolExecutor(min(len(opened), WORKERS)) as hashing:  # in C, without Python's lock
            tensors = list(hashing.map(_checked, checkpoints, recipe.contributors))
        rows: list[RowStatistics] | None = None
        if recipe.rescale == "common":
            pairs = zip(opened, recipe.contributors, strict=True)
            rows = [row_statistics(self._scans, fingerprint, c.tensor) for (_, fingerprint), c in pairs]
        grams = [self._gram(c) for c in recipe.contributors] if recipe.method == "regmean" else None
        digest = self._store.put(recipe.contributors[0].tensor, merge(recipe, tensors, rows, grams))
        for checkpoint, contributor in zip(checkpoints, recipe.contributors, strict=True):
            checkpoint.release(contributor.tensor)
        self._store.remember_recipe(key, digest)
        return digest


def _checked(checkpoint: Checkpoint, contributor: Contributor) -> Tensor:
    header = checkpoint.header(contributor.tensor)
    tensor = checkpoint.tensor(contributor.tensor)
    found = tensor_digest(header.dtype, header.shape, raw_bytes(tensor))
    if found != contributor.digest:
        raise MergeError(
            "the tensor is not the one that was grouped: the checkpoint changed since",
            model=contributor.model,
            file=header.file,
            tensor=contributor.tensor,
            remedy="build again, so that the model's checkpoint stage sees the new files",
        )
    return tensor
