"""An artifact root made by hand: a pool that was exported three times, with records, spectra and moments of inputs."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sandhi_core.artifacts import Artifacts
from sandhi_core.checkpoints.side_files import keep
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.garbage.in_use import InUse
from sandhi_core.garbage.plan import Garbage, garbage
from sandhi_core.graph import Catalogue
from sandhi_core.layout import DEPLOYMENT
from sandhi_core.offers import short_file, spectrum_file
from sandhi_core.recipes import recipe_key
from sandhi_core.records import Contributor, Plan, PlannedMerge, PlannedStep, Recipe, Step, Trajectory
from tests.deployed import deployed
from tests.exported import DOWN, GATE, Case

NOBODY = InUse({}, {}, 0)
INPUTS = {"single": "1" * 64, "tied": "2" * 64, "sharded": "3" * 64}
OLD_INPUTS = "4" * 64


@dataclass
class Root:
    """`exports`: oldest first, all deployed once; the last is the deployed one. `wanted` and `orphan`: digests of the
    store that a trajectory refers to, and that nobody does."""

    case: Case
    artifacts: Artifacts
    exports: list[Path]
    wanted: set[str]
    orphans: set[str]

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue({"small": self.case.pool}, dict.fromkeys(self.case.checkpoints, "h32-f32"))

    def garbage(self, *, keep: int = 1, gone: bool = False, in_use: InUse = NOBODY, pools: bool = True) -> Garbage:
        catalogue = self.catalogue if pools else Catalogue({}, {})
        return garbage(catalogue, self.artifacts, in_use, keep=keep, gone=gone, inputs=INPUTS)


def make_root(case: Case) -> Root:
    """The case's pool exported with all that it shares, with less, and with little."""
    artifacts = Artifacts(case.root)
    exports = []
    for number, left_out in enumerate(((), (DOWN,), (DOWN, GATE))):
        case.tensors = {m: {n: d for n, d in t.items() if n not in left_out} for m, t in case.tensors.items()}
        export = deployed(case)
        os.utime(export / DEPLOYMENT, (number, number))
        exports.append(export)
        artifacts.save(("merged_weights", "small"), "", None, case.export())
        spec = DeploymentSpec.model_validate_json((export / DEPLOYMENT).read_bytes())
        artifacts.save(("deployment", "small"), "", None, spec)
    wanted, orphans = _walked(case, artifacts)
    for folder, key in {"single": INPUTS["single"], "old": OLD_INPUTS}.items():
        keep(case.root / "inputs" / key / f"{folder}.safetensors", {"0000": torch.ones(4)})
    return Root(case, artifacts, exports, wanted, orphans)


def _walked(case: Case, artifacts: Artifacts) -> tuple[set[str], set[str]]:
    """A plan and a trajectory of `single`: one tensor planned, one accepted, one rejected; and their spectra."""
    artifacts.save(("checkpoint", "single"), "", None, case.fingerprints["single"])
    planned, accepted, rejected = (case.store.put(GATE, torch.full((48, 32), value)) for value in (1.0, 2.0, 3.0))
    own = case.fingerprints["single"].tensor(GATE).digest
    recipes = [_recipe(own), _recipe(planned)]
    for recipe, digest in zip(recipes, (planned, rejected), strict=True):
        case.store.remember_recipe(recipe_key(recipe), digest)
    for digest in (planned, rejected):
        path = case.root / "spectra" / spectrum_file(own, digest, INPUTS["single"], GATE)
        keep(path, {"squares": torch.ones(3)})
        keep(short_file(path), {"squares": torch.ones(3)})
    merge = PlannedMerge(tensor=GATE, projection="gate", nbytes=1, recipe=recipes[0])
    step = PlannedStep(component="mlp", layer=0, merges=(merge,))
    plan = Plan(pool="small", model="single", fingerprint="", steps=(step,))
    artifacts.save(("plan", "small.single"), "", None, plan)
    steps = (
        Step(index=0, component="mlp", layer=0, decision="accepted", scores=None, tensors={GATE: accepted}),
        Step(index=1, component="mlp", layer=0, decision="rejected", scores=None, tensors={GATE: rejected}),
    )
    walk = Trajectory(
        pool="small",
        model="single",
        plan="",
        baseline={},
        higher_is_better={},
        tolerance={},
        questions={},
        evaluations=2,
        steps=steps,
    )
    artifacts.save(("trajectory", "small.single"), "", None, walk)
    return {planned, accepted}, {rejected}


def _recipe(digest: str) -> Recipe:
    by = (Contributor(model="single", layer=0, tensor=GATE, digest=digest),)
    return Recipe(projection="gate", shape=(48, 32), dtype="F32", method="mean", rescale="none", contributors=by)
