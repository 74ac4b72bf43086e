"""What `sandhi verify` prints for people: its document as tables of plain text, wherever the command runs."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sandhi_core.errors import Problem
from sandhi_core.words import count, percent, size, yes

_KINDS = ("private", "duplicate", "merged")
_HELD = ("rss", "pss", "shared", "private", "unmapped", "whole")


def tell(table: Mapping[str, Any]) -> None:
    """What one export holds and shares, what its servers were found to hold and answer, on standard output; everything
    that is not as its manifest and deployment say on standard error, before the verdict."""
    problems = [Problem.model_validate(problem).line() for problem in table["problems"]]
    if "manifest" not in table:  # one of several exports that cannot be looked at
        _print(problems, sys.stderr)
        return
    _print(_holds(table), sys.stdout)
    if table["memory"] is not None:
        _print(_measured(table["bytes"], table["memory"]), sys.stdout)
    if table["answers"] is not None:
        _print(_answers(table["answers"]), sys.stdout)
    _print(problems, sys.stderr)
    errors = sum(problem["severity"] == "error" for problem in table["problems"])
    verdict = count(errors, "error") if errors else "everything is as recorded"
    _print([f"{count(table['tensors_checked'], 'tensor')} re-read: {verdict}"], sys.stdout)


def _print(lines: "Iterator[str] | Sequence[str]", where: Any) -> None:
    for line in lines:
        print(line, file=where, flush=True)


def _holds(table: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (model, *(f"{row[k]['tensors']} ({size(row[k]['bytes'])})" for k in _KINDS), row["linked"])
        for model, row in table["models"].items()
    ]
    yield f"{table['export']}: pool {table['pool']} at point {table['point']}, tensors (bytes)"
    yield from _table(("model", *_KINDS, "linked"), rows)
    whole, distinct, saved = (table["bytes"][key] for key in ("checkpoints", "distinct", "saved"))
    yield f"{size(whole)} of checkpoints in {size(distinct)} of files: {percent(saved, whole)} saved."


def _measured(found: Mapping[str, int], memory: Mapping[str, Any]) -> Iterator[str]:
    """Servers of the export, and of the originals where they are known; then the savings, one way of counting each."""
    for what, servers in (("export", memory), ("originals", memory["originals"])):
        if servers is not None:
            yield f"Servers of the {what}: {servers['engine']}"
            yield from _processes(servers)
    savings = {"claimed": found["claimed"], "on disk": found["saved"], "in memory, shared": memory["shared"]}
    if memory["saved"] is not None:
        savings["in memory, less than the originals"] = memory["saved"]
    rows = [(words, size(n), f"{n:,}", percent(n, found["checkpoints"])) for words, n in savings.items()]
    yield "Saved"
    yield from _table(("bytes", "size", "exactly", "of all"), rows)


def _processes(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each process that holds any weights, for what the others of a server take, and for all of them."""
    rows = []
    for model, server in found["servers"].items():
        first, *rest = server["processes"]
        rows.append((model, str(first["pid"]), *_sizes(first), f"{1000 * server['seconds']:,.0f} ms"))
        if rest:
            others = {key: sum(process[key] for process in rest) for key in _HELD}
            rows.append(("", count(len(rest), "other"), *_sizes(others), ""))
    rows.append(("all", "", *_sizes(found["sum"]), ""))
    columns = ("model", "process", "resident", "PSS", "shared", "private", "copies", "whole process", "a request")
    return _table(columns, rows)


def _sizes(process: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(size(process[key]) for key in _HELD)


def _answers(answers: Mapping[str, Any]) -> Iterator[str]:
    yield "Answers of the servers, held to the evaluator"
    rows = [
        (model, a["dtype"], *(str(a[key]) for key in ("prompts", "tokens", "different", "ties")),
         f"{a['largest']:.1e}", yes(a["equal"]))
        for model, a in answers.items()
    ]  # fmt: skip
    columns = ("model", "dtype", "prompts", "tokens", "others", "of them ties", "log-probability off by", "the same")
    yield from _table(columns, rows)
    for model, a in answers.items():
        yield f"{model} is held to {a['reference']}."


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column is text and stands to the left, the others to the right; a blank line ends it."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, ["-" * width for width in widths], *rows):
        first, *rest = zip(row, widths, strict=True)
        yield "  ".join((first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest))).rstrip()
    yield ""
