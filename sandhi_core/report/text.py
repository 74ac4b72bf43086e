"""What commands print for people: the documents of `--json` as tables. Text from outside is never markup."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sandhi_core.errors import Problem
from sandhi_core.report import notes
from sandhi_core.words import count, number, percent, signed, size, yes

NEVER_FOLDED = 10_000
"""Columns of every output: terminals fold lines by themselves, and whatever reads a pipe wants them whole."""

_STYLES = {"error": "bold red", "warning": "yellow"}
_BYTES = {
    "checkpoints": "all checkpoints",
    "duplicates": "exact duplicates",
    "added": "added by residuals",
    "claimed": "claimed",
    "verified_disk": "verified on disk",
    "verified_memory": "verified in memory",
}


def _console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, width=NEVER_FOLDED)


@dataclass(frozen=True)
class _Titled:
    """A table below its title, without the blanks that rich puts at the ends of lines."""

    title: str
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        for segments in console.render_lines(self.table, options, pad=False):
            while segments and not segments[-1].text.strip():
                segments.pop()
            if segments:
                *whole, last = segments
                yield from whole
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, words: int) -> _Titled:
    """The first `words` columns hold text; what follows is numbers and stands to the right."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return _Titled(title, table)


def print_check(document: Mapping[str, Any]) -> None:
    """Every problem with its remedy on standard error; where none is an error, what a build would cost."""
    _problems(document["problems"])
    console = _console()
    if document["ok"]:
        _cost(console, document["plan"])
    console.print(_soundness(document))


def _problems(problems: Sequence[Mapping[str, Any]]) -> None:
    console = _console(stderr=True)
    for found in problems:
        problem = Problem.model_validate(found)
        console.print(Text(problem.line(), style=_STYLES[problem.severity]), soft_wrap=True)


def _soundness(document: Mapping[str, Any]) -> str:
    errors = sum(p["severity"] == "error" for p in document["problems"])
    return "sound" if document["ok"] else f"not sound: {count(errors, 'error')}"


def _cost(console: Console, plan: Mapping[str, Any]) -> None:
    console.print(
        f"At most {plan['evaluations']:,} evaluations, {plan['decompositions']:,} matrices decomposed, "
        f"{size(plan['bytes_read'])} read and "
        f"{size(plan['bytes_written'])} written."
    )
    groups = [
        (g["key"], ", ".join(g["models"]), str(g["sets"]), size(g["nbytes"])) for g in plan["groups"] if g["sets"]
    ]
    if groups:
        columns = ("group", "models", "matrices in common", "bytes of one copy of each")
        console.print(_table("Models that can share", columns, groups, words=2))
    else:
        console.print("No two models can share a matrix.")
    if plan["excluded"]:
        alone = [(e["model"], e["reason"], str(e["slots"])) for e in plan["excluded"]]
        console.print(_table("Matrices that cannot be shared", ("model", "reason", "matrices"), alone, words=2))


_WHEN = {"stale": "will run", "waiting": "may run, if what it depends on changes"}


def print_dry_run(document: Mapping[str, Any]) -> None:
    """What a build would run now, what may become stale by that, and the cost of both; problems on standard error."""
    _problems(document["problems"])
    console = _console()
    rows = [(stage, key, when) for state, when in _WHEN.items() for stage, key in document[state]]
    if rows:
        console.print(_table("What a build would run", ("stage", "for", "when"), rows, words=3))
        if document["ok"]:
            _cost(console, document["plan"])
    elif document["ok"]:
        console.print("Nothing is stale.")
    if not document["ok"]:
        console.print(_soundness(document))


def print_build(document: Mapping[str, Any]) -> None:
    """Every model and the bytes of each pool, what ran, and where everything lies."""
    console = _console()
    for name, pool in document["pools"].items():
        console.print(_models(name, pool))
        for note in notes.scored(pool["rounding"]):
            console.print(Text(f"{note}\n"))
        console.print(_bytes(pool["bytes"]))
        if pool["stock"] is not None:
            _stock(console, pool["stock"], pool["bytes"]["claimed"])
        for what in ("export", "deployment", "report"):
            console.print(Text(f"{what + ':':<12}{pool[what]}"), soft_wrap=True)
    stages = Counter(stage for stage, _ in document["ran"])
    ran = ", ".join(f"{n} {stage}" for stage, n in stages.items())
    scored = sum(document["evaluations"].values())
    console.print(f"Ran {ran}; {count(scored, 'evaluation')}." if ran else "Nothing was stale, nothing ran.")


_GARBAGE = {
    "export": "exports",
    "record": "records of models and pools that are gone",
    "report": "reports of pools that are gone",
    "spectrum": "decomposed differences (spectra/)",
    "inputs": "moments of inputs (inputs/)",
    "recipe": "notes of recipes",
    "tensor": "shared tensors and residuals (store/)",
}


def print_garbage(document: Mapping[str, Any]) -> None:
    """What goes by kind with what it frees, each export by itself, and what stays and why; problems on standard
    error."""
    _problems(document["problems"])
    console = _console()
    found, sizes = Counter[str](), Counter[str]()
    for removal in document["removals"]:
        found[removal["kind"]] += 1
        sizes[removal["kind"]] += removal["bytes"]
    if found:
        rows = [(words, str(found[kind]), size(sizes[kind])) for kind, words in _GARBAGE.items() if found[kind]]
        title = "Removed" if document["applied"] else "What `--apply` would remove"
        console.print(_table(title, ("what", "number", "frees"), rows, words=1))
    moved = [(r["path"], size(r["bytes"])) for r in document["removals"] if r["kind"] == "export"]
    if moved:
        console.print(_table("Exports that go", ("export", "frees"), moved, words=1))
    if document["kept"]:
        stays = [(export["path"], export["why"]) for export in document["kept"]]
        console.print(_table("Exports that stay", ("export", "why"), stays, words=2))
    if document["others"]:
        console.print(f"Not looked at: pools {', '.join(document['others'])} (--gone: these are no more)")
    console.print(f"{'Freed' if document['applied'] else 'Would free'} {size(document['freed'])}.")


def _stock(console: Console, plan: Mapping[str, Any], claimed: int) -> None:
    console.print(Text(f"Stock adapters: {plan['told']}."))
    for base, models in plan["bases"].items():
        console.print(Text(f"  {base}: {', '.join(models)}"))
    for model, why in plan["ordinary"].items():
        first = f", first {why['first']} ({why['count']} in all, {size(why['nbytes'])})" if why["first"] else ""
        console.print(Text(f"  {model} is none: it {why['reason']}{first}"))
    if plan["bases"]:
        console.print(Text(notes.engines(claimed, plan["weights_bytes_before"], plan["weights_bytes"])))
        console.print(Text(f"{notes.STOCK[-1]}\n"))


def _models(name: str, pool: Mapping[str, Any]) -> _Titled:
    columns = (
        "model",
        "task",
        "metric",
        "original",
        "merged",
        "95 % interval",
        "budget",
        "within",
        "certified",
    )
    rows = [
        (
            model,
            t["task"],
            t["metric"],
            number(t["original"]),
            number(t["merged"]),
            f"{signed(t['low'])} to {signed(t['high'])}",
            f"{t['budget']:g}",
            _verdict(t["within_budget"]),
            yes(t["certified"]),
        )
        for model, entry in pool["models"].items()
        for t in entry["tasks"]
    ]
    title = f"Pool {name} at point {pool['point']}, on questions never used before (interval: of the change)"
    return _table(title, columns, rows, words=3)


def _verdict(held: bool) -> Text:
    return Text(yes(held), style="green" if held else "bold red")


def _bytes(found: Mapping[str, int]) -> _Titled:
    whole = found["checkpoints"]
    told = {key: words for key, words in _BYTES.items() if key != "added" or found[key]}
    rows = [(words, size(found[key]), f"{found[key]:,}", percent(found[key], whole)) for key, words in told.items()]
    return _table("Bytes", ("bytes", "size", "exactly", "of all"), rows, words=1)
