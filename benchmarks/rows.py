"""What every row of the table holds, and how wide the figures are printed."""

import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Row:
    """One comparison over a whole run. `ours` and `theirs` in seconds; `notes` say what was extrapolated."""

    name: str
    model: str
    against: str
    ours: float
    theirs: float
    decisions: str
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    peak_mib: int = 0  # of this process, up to the end of the row

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def peak_mib() -> int:
    """The most memory this process has held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; all but the first to the right."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    rows = [head, ["-" * width for width in widths], *lines]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in rows
    )


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def compared(rows: Sequence[Row]) -> str:
    """The rows as a table, with their notes below."""
    head = ("row", "model", "ours, s", "other, s", "ratio", "decisions", "peak MiB", "other way")
    lines = [
        (
            *(r.name, r.model, seconds(r.ours), seconds(r.theirs), f"{r.ratio:.2f}x", r.decisions),
            *(f"{r.peak_mib:,}", r.against),
        )
        for r in rows
    ]
    notes = [f"{row.name}: {note}" for row in rows for note in row.notes]
    return "\n".join([table(head, lines), "", *notes])
