"""Figures as Dagster metadata, so that the UI shows them where people look."""

import base64
import io

import dagster as dg
from matplotlib.figure import Figure


def picture(figure: Figure) -> dg.MarkdownMetadataValue:
    """The figure as a PNG inside Markdown, which the UI renders."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return dg.MetadataValue.md(f"![figure](data:image/png;base64,{data})")
