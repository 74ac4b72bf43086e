"""What records and exports that stay refer to: tensors of the store, recipes, spectra. The rest nobody asks for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandhi_core.artifacts import Artifacts
from sandhi_core.assignment import parts_of
from sandhi_core.offers import short_file, spectrum_file
from sandhi_core.recipes import recipe_key
from sandhi_core.records import Fingerprint, Manifest, Plan, Trajectory
from sandhi_core.store import Store


@dataclass
class References:
    """`tensors`: digests of the store; `recipes`: names by which it remembers what a recipe gave; `spectra`: names of
    files."""

    tensors: set[str] = field(default_factory=set)
    recipes: set[str] = field(default_factory=set)
    spectra: set[str] = field(default_factory=set)


def references(
    artifacts: Artifacts, members: Iterable[str], manifests: Iterable[Manifest], inputs: Mapping[str, str]
) -> References:
    """Of the plans and trajectories of `members` (`POOL.MODEL`) and of exports. `inputs`: by model the key of the
    moments of its inputs, where it has any; spectra of other models are not asked for. Raises StoreError for a record
    that cannot be read."""
    found = References()
    store = Store(artifacts.root / "store")
    for member in members:
        if artifacts.known(("plan", member)) is not None:
            _planned(found, artifacts, store, member, inputs.get(member.rpartition(".")[2]))
        if artifacts.known(("trajectory", member)) is not None:
            _walked(found, artifacts.load(Trajectory, "trajectory", member))
    for manifest in manifests:
        found.tensors |= {t.digest for model in manifest.models.values() for t in model.tensors.values()}
    return found


def _planned(found: References, artifacts: Artifacts, store: Store, member: str, inputs: str | None) -> None:
    """Every tensor that the plan offers: what a search that was stopped goes on with."""
    model = member.rpartition(".")[2]
    fingerprint = artifacts.known(("checkpoint", model))
    own = {t.name: t.digest for t in Fingerprint.model_validate(fingerprint.record).tensors} if fingerprint else {}
    for merge in (merge for step in artifacts.load(Plan, "plan", member).steps for merge in step.merges):
        key = recipe_key(merge.recipe)
        found.recipes.add(key)
        tensor = store.recipe_tensor(key)
        if tensor is None:
            continue
        found.tensors.add(tensor)
        if inputs is not None and merge.tensor in own:
            name = spectrum_file(own[merge.tensor], tensor, inputs, merge.tensor)
            scaled = spectrum_file(own[merge.tensor], tensor, inputs, merge.tensor, "affine")
            found.spectra |= {name, short_file(Path(name)).name, scaled}


def _walked(found: References, trajectory: Trajectory) -> None:
    """What a cutoff may take: a rejected step's tensors are made again where a search asks for them."""
    for step in trajectory.steps:
        if step.decision == "accepted":
            found.tensors |= set(step.tensors.values())
            for tensor, added in step.adjustments.items():
                found.tensors |= set(parts_of(tensor, added).values())
