"""What commands print for people: the documents of `--json` as tables. Text from outside is never markup."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sandhi_core.errors import Problem
from sandhi_core.report.words import NOT_MEASURED, count, number, percent, signed, size, yes

PIPE_WIDTH = 132
"""Columns where the output is no terminal: wide enough that no table of a small pool wraps."""

_STYLES = {"error": "bold red", "warning": "yellow"}
_BYTES = {
    "checkpoints": "all checkpoints",
    "duplicates": "exact duplicates",
    "claimed": "claimed",
    "verified_disk": "verified on disk",
    "verified_memory": "verified in memory",
}


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=PIPE_WIDTH)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, words: int) -> Table:
    """The first `words` columns hold text; what follows is numbers and stands to the right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_check(document: Mapping[str, Any]) -> None:
    """Every problem with its remedy, then what a build would cost."""
    console = _console()
    _problems(console, document["problems"])
    _cost(console, document["plan"])
    errors = sum(p["severity"] == "error" for p in document["problems"])
    console.print("sound" if document["ok"] else f"not sound: {count(errors, 'error')}")


def _problems(console: Console, problems: Sequence[Mapping[str, Any]]) -> None:
    for found in problems:
        problem = Problem.model_validate(found)
        console.print(Text(problem.line(), style=_STYLES[problem.severity]), soft_wrap=True)


def _cost(console: Console, plan: Mapping[str, Any]) -> None:
    console.print(
        f"At most {plan['evaluations']:,} evaluations, {size(plan['bytes_read'])} read and "
        f"{size(plan['bytes_written'])} written."
    )
    groups = [(g["key"], ", ".join(g["models"]), str(g["sets"]), size(g["nbytes"])) for g in plan["groups"]]
    columns = ("group", "models", "sets of slots", "kept once")
    console.print(_table("Models that can share", columns, groups, words=2))
    if plan["excluded"]:
        alone = [(e["model"], e["reason"], str(e["slots"])) for e in plan["excluded"]]
        console.print(_table("Slots without a partner", ("model", "reason", "slots"), alone, words=2))


def print_dry_run(document: Mapping[str, Any]) -> None:
    """What a build would run now, what may become stale by that, and the cost of both."""
    console = _console()
    _problems(console, document["problems"])
    rows = [(stage, key, state) for state in ("stale", "waiting") for stage, key in document[state]]
    if not rows:
        console.print("Nothing is stale.")
        return
    console.print(_table("What a build would run", ("stage", "key", "state"), rows, words=3))
    _cost(console, document["plan"])


def print_build(document: Mapping[str, Any]) -> None:
    """Every model and the bytes of each pool, what ran, and where everything lies."""
    console = _console()
    for name, pool in document["pools"].items():
        console.print(_models(name, pool))
        console.print(_bytes(pool["bytes"]))
        for what in ("export", "deployment", "report"):
            console.print(Text(f"{what + ':':<12}{pool[what]}"), soft_wrap=True)
    stages = Counter(stage for stage, _ in document["ran"])
    ran = ", ".join(f"{n} {stage}" for stage, n in stages.items())
    scored = sum(document["evaluations"].values())
    console.print(f"Ran {ran}; {count(scored, 'evaluation')}." if ran else "Nothing was stale, nothing ran.")


def _models(name: str, pool: Mapping[str, Any]) -> Table:
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


def _bytes(found: Mapping[str, int]) -> Table:
    whole = found["checkpoints"]
    rows = [(words, size(found[key]), f"{found[key]:,}", percent(found[key], whole)) for key, words in _BYTES.items()]
    return _table("Bytes", ("bytes", "size", "exactly", "of all"), rows, words=1)


def print_verify(table: Mapping[str, Any]) -> None:
    """What an export holds and shares, and everything that is not as its manifest says."""
    console = _console()
    kinds = ("private", "duplicate", "merged")
    rows = [
        (
            model,
            *(f"{row[k]['tensors']} ({size(row[k]['bytes'])})" for k in kinds),
            row["linked"],
            _memory(table, model),
        )
        for model, row in table["models"].items()
    ]
    title = f"Export of pool {table['pool']} at point {table['point']}: tensors (bytes)"
    columns = ("model", "private", "identical", "merged", "linked", "in memory")
    console.print(_table(title, columns, rows, words=1))
    total, distinct = table["bytes"]["models"], table["bytes"]["distinct"]
    console.print(f"{size(total)} of weights in {size(distinct)} of files: {percent(total - distinct, total)} shared.")
    if table["memory"] is not None:
        console.print(f"In memory {size(table['memory']['saved'])} are shared ({table['memory']['engine']}).")
    for problem in table["problems"]:
        console.print(Text(f"problem: {problem}", style=_STYLES["error"]), soft_wrap=True)
    checked = count(table["tensors_checked"], "tensor")
    verdict = f"{len(table['problems'])} problems" if table["problems"] else "every digest is as recorded"
    console.print(f"{checked} re-read: {verdict}")


def _memory(table: Mapping[str, Any], model: str) -> str:
    if table["memory"] is None:
        return NOT_MEASURED
    process = table["memory"]["processes"][model]
    return size(process["pss"] + process["unmapped"])
