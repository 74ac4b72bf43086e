"""Second moments of inputs are those of a plain forward pass over the same tokens."""

from pathlib import Path

import torch

from sandhi_core.checkpoint import Checkpoint
from sandhi_core.evaluation.inputs import input_grams
from sandhi_core.evaluation.layers import _Run
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.tasks import load_tasks
from sandhi_core.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.scan import fingerprint
from tests.evaluation.local_tasks import choice_task
from tests.models import tiny


def test_every_slot_has_the_moments_of_what_it_reads(tmp_path: Path) -> None:
    directory = tiny("llama", tmp_path / "m", num_hidden_layers=2)
    choice_task(tmp_path / "tasks")
    settings = EvaluationSettings(include_path=str(tmp_path / "tasks"), device="cpu", dtype="float32")
    entry = ModelEntry(name="m", path=str(directory), tasks=(TaskBudget(task="letters", metric="acc", budget=0.1),))
    held = Resident(directory, "m", settings)
    suite = load_tasks(entry, settings, tmp_path / "cache")
    found = fingerprint(Checkpoint.open(directory, "m"), tmp_path / "scans")
    grams = input_grams(held, suite, "profile", found.slots)
    assert set(grams) == {slot.tensor for slot in found.slots}

    packs = [pack for asked in held.scorer.sets.kept.values() for pack in asked.packs]
    seen: dict[str, list[torch.Tensor]] = {slot.tensor: [] for slot in found.slots}
    hooks = [
        held.module(name).register_forward_pre_hook(lambda _, given, name=name: seen[name].append(given[0][0]))
        for name in seen
    ]
    with torch.inference_mode():
        for pack in packs:
            held.scorer._layered.logits(pack, _Run())
    for hook in hooks:
        hook.remove()
    for name, inputs in seen.items():
        rows = torch.cat(inputs)
        torch.testing.assert_close(grams[name].blocks[0], rows.T @ rows / len(rows), rtol=1e-4, atol=1e-6)
