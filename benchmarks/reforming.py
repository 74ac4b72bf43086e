"""What a joint round of re-forming would gain: shared tensors made again by those who took them, all searched again.

    python -m benchmarks.reforming pools/demo.yaml --work /tmp/reforming --out benchmarks

Each way is built as `sandhi build` does it. Then every average whose contributors did not all take it is replaced by
that of those who did (two at least), and the pool is built again: the models are searched anew over the new tensors.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lines import WAYS, built, offered
from benchmarks.outcomes import Outcome, told
from benchmarks.ways import commit, say
from sandhi_core.artifacts import Artifacts
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import Pool, load_pool
from sandhi_core.records import Group, Groups, MergedWeights

ASKED = ("walk", "ladder without residuals", "ladder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pools", type=Path, nargs="+", help="pool files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the builds")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for reforming-POOL.txt")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=ASKED)
    arguments = parser.parse_args()
    for file in arguments.pools:
        pool = load_pool(file)
        found = [row for way in arguments.ways for row in rounds(pool, way, arguments.work / pool.name / way)]
        text = f"{told(found)}\n\ncommit {commit()}\n"
        print(text, end="")
        (arguments.out / f"reforming-{pool.name}.txt").write_text(text)


def rounds(pool: Pool, way: str, folder: Path) -> list[Outcome]:
    """The rows of a way: as it is, and after one round."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = offered(WAYS[way], ())
    before = built(way, pool, sections, folder)
    told = reform(Artifacts(folder / "root"), pool.name)
    say(f"{way}: {told}")
    after = built(f"{way}, re-formed", pool, sections, folder)
    after.notes.append(str(told))
    return [before, after]


@dataclass(frozen=True)
class Round:
    """How many averages there are, and how many of them are made by fewer models now."""

    averages: int
    changed: int

    def __str__(self) -> str:
        return f"{self.changed} of {self.averages} averages re-formed by those who took them"


def reform(artifacts: Artifacts, pool: str) -> Round:
    """Make the round's groups, in place of those that are there."""
    export = artifacts.root / artifacts.load(MergedWeights, "merged_weights", pool).export
    models = read_manifest(export).models
    taken = {(m, name) for m, model in models.items() for name, t in model.tensors.items() if t.sharing != "private"}
    averages = changed = 0
    for key in artifacts.keys("groups"):
        envelope = artifacts.required(("groups", key))
        record = artifacts.load(Groups, "groups", key)
        after = tuple(reformed(group, taken) for group in record.groups)
        averages += sum(len(g.recipe.contributors) > 1 for g in record.groups)
        changed += sum(a is not b for a, b in zip(record.groups, after, strict=True))
        artifacts.save(("groups", key), envelope.fingerprint, envelope.own, record.model_copy(update={"groups": after}))
    return Round(averages, changed)


def reformed(group: Group, taken: set[tuple[str, str]]) -> Group:
    left = tuple(c for c in group.recipe.contributors if (c.model, c.tensor) in taken)
    if len(left) < 2 or len(left) == len(group.recipe.contributors):
        return group
    return group.model_copy(update={"recipe": group.recipe.model_copy(update={"contributors": left})})


if __name__ == "__main__":
    main()
