"""What the round of re-forming gains: averages made again by those who took them, and all models searched again.

    python -m benchmarks.reforming pools/demo.yaml --work /tmp/reforming --out benchmarks

Each way is built once, and then again by `sandhi build --regroup` with `grouping: {on_regroup: accepted}`, until the
groups come out as they were or the rounds are used up.
"""

import argparse
from pathlib import Path

from benchmarks.lines import WAYS, built, offered
from benchmarks.outcomes import Outcome, told
from benchmarks.ways import commit, say
from sandhi_core.artifacts import Artifacts
from sandhi_core.pools.pool import Pool, load_pool
from sandhi_core.records import Groups

ASKED = ("walk", "ladder without residuals", "ladder")
ROUNDS = 2


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
    """The rows of a way: as it is, and after every round that changed something."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = dict(offered(WAYS[way], ()))
    sections["grouping"] = {**sections.get("grouping", {}), "on_regroup": "accepted"}
    found, made = [built(way, pool, sections, folder)], makers(folder / "root")
    for number in range(1, ROUNDS + 1):
        outcome = built(f"{way}, round {number}", pool, sections, folder, "--regroup")
        before, made = made, makers(folder / "root")
        if made == before:
            break
        changed = sum(a != b for a, b in zip(before, made, strict=True))
        outcome.notes.append(f"{changed} of {len(made)} averages by fewer models than before")
        say(f"{outcome.name}: {outcome.notes[-1]}")
        found.append(outcome)
    return found


def makers(root: Path) -> list[tuple[str, ...]]:
    """By group the models that make its average."""
    artifacts = Artifacts(root)
    records = [artifacts.load(Groups, "groups", key) for key in sorted(artifacts.keys("groups"))]
    found = {g.members: tuple(c.model for c in g.recipe.contributors) for r in records for g in r.groups}
    return [found[members] for members in sorted(found, key=lambda slots: [(s.model, s.tensor) for s in slots])]


if __name__ == "__main__":
    main()
