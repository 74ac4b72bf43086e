"""Tables as Dagster metadata."""

import dagster as dg

from sandhi_core.report.page import Table

MOST_ROWS = 200
"""The event log keeps every materialisation's for ever."""


def table(shown: Table) -> dg.TableMetadataValue:
    """The rows as text, as the report has them; what does not fit is told in a last row."""
    rows = [dict(zip(shown.columns, (cell.text for cell in row), strict=True)) for row in shown.rows[:MOST_ROWS]]
    first, *others = shown.columns
    if not rows:
        rows = [{first: shown.empty, **dict.fromkeys(others, "")}]
    elif len(shown.rows) > MOST_ROWS:
        rows.append({first: f"and {len(shown.rows) - MOST_ROWS} more", **dict.fromkeys(others, "")})
    columns = [dg.TableColumn(name, "string") for name in shown.columns]
    return dg.MetadataValue.table([dg.TableRecord(row) for row in rows], dg.TableSchema(columns))
