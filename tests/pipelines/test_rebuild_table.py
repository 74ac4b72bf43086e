"""What re-runs when, edit by edit, as docs/rebuilds.md says it: by the command line, and by the sensor's runs."""

import dataclasses
import io
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pipelines.headless import build
from pipelines.progress import Progress
from sandhi_core.catalogue import load_catalogue
from sandhi_core.graph import STAGES, Node
from sandhi_core.records import MemoryComparison
from tests.conftest import CHECKOUT
from tests.models import edit_tensors
from tests.pipelines.life import Done, Life, copied, events, inconsistent, since

pytestmark = pytest.mark.slow


class Row(NamedTuple):
    """What is done, what runs, and of that what scores a model anew; in the words of the page."""

    edit: str
    runs: str
    scores: str


TABLE = (
    Row("nothing", "nothing", "nothing"),
)

WORDS = {"walk": ("trajectory", "cutoffs", "holdout"), "end": tuple(s for s, t in STAGES.items() if t.scope == "pool")}
GROUPS = {"narrow": "h32-bf16", "wide": "h64-bf16"}


def nodes(cell: str) -> set[Node]:
    """`plan: p.a, p.b; walk: p.b` as nodes."""
    if cell == "nothing":
        return set()
    found = set()
    for clause in cell.split("; "):
        stages, _, keys = clause.partition(": ")
        for key in keys.split(", "):
            pool, dot, rest = key.partition(".")
            for stage in stages.split(", "):
                found |= {(one, pool + dot + GROUPS.get(rest, rest)) for one in WORDS.get(stage, (stage,))}
    return found


def moved(found: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        if "mlp" in name:
            found[name] = tensor + 0.05 * torch.sign(tensor)


def renamed(life: Life) -> None:
    text = life.file("q").read_text()
    life.file("q").unlink()
    life.file("r").write_text(re.sub("^name: q$", "name: r", text, flags=re.MULTILINE))


def reworded(life: Life) -> None:
    with (life.folder / "tasks" / "numbers.yaml").open("a") as file:
        file.write("description: 'Which numbers come next? '\n")


Change = Callable[[Life], None]
EDITS: dict[str, Change] = {
    "nothing": lambda life: None,
    "f is added to p (`on_new_model: join`)": lambda life: life.write("p", "abcfuv"),
    "f is added to q (`on_new_model: regroup`)": lambda life: life.write("q", "def"),
    "c is removed from p": lambda life: life.write("p", "abuv"),
    "weights of a": lambda life: edit_tensors(life.folder / "models" / "a", moved),
    "the file of task `numbers`": reworded,
    "budget of b, in p (`tolerance` set)": lambda life: life.write("p", budgets={"b": 0.05}),
    "budget of d, in q (no `tolerance`)": lambda life: life.write("q", budgets={"d": 0.05}),
    "`search.tolerance` of p": lambda life: life.write("p", search={"tolerance": 0.1}),
    "`search.stride` of q": lambda life: life.write("q", search={"stride": 1}),
    "`evaluation.dtype` of q": lambda life: life.write("q", evaluation={"dtype": "bfloat16"}),
    "`evaluation.device` of q, to another of the same kind": lambda life: life.write("q", evaluation={"device": "auto"}),
    "`deploy.device_memory` of q": lambda life: life.write("q", deploy={"device_memory": "40GiB"}),
    "pool r is added, of a (which p has too) and the new g": lambda life: life.write("r", "ag"),
    "pool q is called r": renamed,
    "pool q is deleted": lambda life: life.file("q").unlink(),
}
