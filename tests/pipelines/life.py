"""Two pools of seven tiny models in two compatibility groups, edited as people edit them, and what each edit ran.

`p` has a, b, c (narrow, fine-tunes of one base) and u, v (wide, of another), joins what is added and has a tolerance
of its own; `q` has d and e, narrow too, and regroups. c is asked `numbers`, the others `letters`. f and g wait to be
added.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import torch
import yaml
from safetensors.torch import load, save

from assets.stage import FINGERPRINT_TAG
from pipelines.instance import opened_instance
from pipelines.settings import Settings
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.graph import STAGES, Node, fingerprint
from sandhi_core.records import digest_of
from tests.evaluation.local_tasks import choice_task
from tests.models import WEIGHTS, fine_tune, tiny_llama

NARROW, WIDE = "abcdefg", "uv"
POOLS = {"p": "abcuv", "q": "de"}
SECTIONS: dict[str, dict[str, Any]] = {
    "p": {"search": {"tolerance": 0.2}},
    "q": {"grouping": {"on_new_model": "regroup"}},
}
EVALUATION = {"include_path": "../tasks", "threads": 1, "device": "cpu", "dtype": "float32"}
BUDGET = 0.2


@dataclass(frozen=True)
class Life:
    """The folder that holds models/, tasks/ and pools/; roots lie elsewhere, so that a copy of one is a copy of all
    that was built."""

    folder: Path

    @classmethod
    def begun(cls, folder: Path) -> "Life":
        for task in ("letters", "numbers"):
            choice_task(folder / "tasks", task, doc_to_choice=["a", "b", "c"])
        for seed, name in enumerate(NARROW + WIDE):
            width = {"hidden_size": 64} if name in WIDE else {}
            base = tiny_llama(folder / "models" / name, seed=7, initializer_range=0.6, **width)
            fine_tune(base, seed=seed, moved=0.3)
        life = cls(folder)
        (folder / "pools").mkdir()
        for pool in POOLS:
            life.write(pool)
        return life

    def write(self, pool: str, models: str = "", budgets: Mapping[str, float] | None = None, **changed: Any) -> None:
        """Write a pool's file anew, with other models, budgets or fields of sections than it had."""
        entries = [
            {
                "name": model,
                "path": f"../models/{model}",
                "tasks": [{"task": "numbers" if model == "c" else "letters", "metric": "acc", "budget": BUDGET}],
            }
            for model in models or POOLS[pool]
        ]
        for entry in entries:
            entry["tasks"][0] |= {"budget": budget} if (budget := (budgets or {}).get(entry["name"])) else {}
        written = {"name": pool, "models": entries, "evaluation": EVALUATION, **SECTIONS.get(pool, {})}
        for name, value in changed.items():
            written[name] = {**written.get(name, {}), **value} if isinstance(value, dict) else value
        self.file(pool).write_text(yaml.safe_dump(written))

    def move(self, model: str) -> None:
        """Train a model a little further: other weights in the same file."""
        path = self.folder / "models" / model / WEIGHTS
        tensors = load(path.read_bytes())
        moved = {n: t + 0.05 * torch.sign(t) if "mlp" in n else t for n, t in tensors.items()}
        path.write_bytes(save(moved, {"format": "pt"}))

    def file(self, pool: str) -> Path:
        return self.folder / "pools" / f"{pool}.yaml"

    def settings(self, root: Path) -> Settings:
        return Settings(self.folder / "pools", root)

    @contextmanager
    def edited(self) -> Iterator[None]:
        """Whatever is done to the files inside is undone: contents, times, inodes, and what was added or removed."""
        before = {p: (p.read_bytes(), p.stat()) for p in self.folder.rglob("*") if p.is_file()}
        try:
            yield
        finally:
            for path in {p for p in self.folder.rglob("*") if p.is_file()} - before.keys():
                path.unlink()
            for path, (data, status) in before.items():
                if not path.exists() or path.read_bytes() != data:
                    path.write_bytes(data)
                    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def copied(root: Path, folder: Path) -> Path:
    """A copy of a root, in which files that are links to one another still are."""
    subprocess.run(["cp", "-a", root, folder / "root"], check=True)
    return folder / "root"


@dataclass(frozen=True)
class Done:
    """What ran, in order, and how many evaluations each did."""

    ran: tuple[Node, ...]
    evaluations: Mapping[Node, int]

    @property
    def scored(self) -> set[Node]:
        return {node for node, count in self.evaluations.items() if count}


def events(root: Path) -> dict[int, tuple[Node, int]]:
    """Every materialisation that the instance of a root knows, by its number: what it made, and its evaluations."""
    found = {}
    with opened_instance(root) as instance:
        for stage in STAGES:
            for record in instance.fetch_materializations(dg.AssetKey(stage), limit=10_000).records:
                event = record.asset_materialization
                assert event is not None and event.partition is not None
                found[record.storage_id] = (stage, event.partition), int(str(event.metadata["evaluations"].value))
    return dict(sorted(found.items()))


def since(before: Mapping[int, object], root: Path) -> Done:
    new = [what for number, what in events(root).items() if number not in before]
    counts: Counter[Node] = Counter()
    for node, evaluations in new:
        counts[node] += evaluations
    return Done(tuple(node for node, _ in new), counts)


def inconsistent(settings: Settings) -> list[str]:
    """Every record of the graph whose fingerprint, data version or tags are not those that are computed here anew."""
    catalogue = load_catalogue(settings.pool_files())
    planner, artifacts = Planner(catalogue, settings.artifacts()), Artifacts(settings.root)
    wrong = []
    with opened_instance(settings.root) as instance:
        for node, upstream in planner.graph.items():
            envelope = artifacts.required(node)
            wanted = fingerprint(node, planner.own(node), {u: artifacts.required(u).data_version for u in upstream})
            if envelope.fingerprint != wanted or envelope.version != STAGES[node[0]].version:
                wrong.append(f"{node}: fingerprint")
            if envelope.data_version != digest_of(envelope.record):
                wrong.append(f"{node}: data version")
            record = instance.get_latest_data_version_record(dg.AssetKey(node[0]), partition_key=node[1])
            if record is None:
                continue  # Dagster's history was lost
            event = record.asset_materialization
            tags = {} if event is None else event.tags or {}
            if (tags.get(FINGERPRINT_TAG), tags.get("dagster/data_version")) != (wanted[:32], envelope.data_version):
                wrong.append(f"{node}: tags")
    return wrong
