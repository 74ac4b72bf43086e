"""Figures as Dagster metadata, so that the UI shows them where people look."""

import base64

import dagster as dg
from matplotlib.figure import Figure

from sandhi_core.report.style import png_bytes


def picture(figure: Figure) -> dg.MarkdownMetadataValue:
    """The figure as a PNG inside Markdown, which the UI renders."""
    return dg.MetadataValue.md(f"![figure](data:image/png;base64,{base64.b64encode(png_bytes(figure)).decode()})")
