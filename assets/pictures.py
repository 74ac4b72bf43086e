"""Figures as Dagster metadata, so that the UI shows them where people look."""

import base64
import re

import dagster as dg

from sandhi_core.report.pictures import Picture
from sandhi_core.report.style import png_bytes

LARGEST_PICTURE = 256 * 1024
"""Bytes of a PNG that the event log takes: it keeps every materialisation's for ever."""


def picture(drawn: Picture) -> dg.MarkdownMetadataValue:
    """The figure as a PNG inside Markdown, which the UI renders, with its words beside it for those who cannot see it.

    Of one that is too large for the event log (a pool of very many models) only the words are kept.
    """
    png = png_bytes(drawn.draw())
    alt = re.sub(r"[\[\]<>\s]+", " ", drawn.alt)  # a task's name is any text
    if len(png) > LARGEST_PICTURE:
        return dg.MetadataValue.md(f"{alt} (The picture is too large to be kept here; the report has it.)")
    return dg.MetadataValue.md(f"![{alt}](data:image/png;base64,{base64.b64encode(png).decode()})")
