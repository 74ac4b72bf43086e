"""How figures look: one palette, one set of sizes, and the same bytes every time.

A figure is drawn once. As PNG it stands on white paper; as SVG inside a page every colour of the palette
becomes a CSS variable, so that the page's light and dark themes both fit it.
"""

import functools
import io
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

P = ParamSpec("P")

# Blue, orange and green are told apart with every common colour blindness (after Okabe and Ito, "Color
# Universal Design", 2008); darker on white, lighter on black. Name to (light theme, dark theme).
PALETTE: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14171c"),
    "ink": ("#1b1f24", "#e6e9ee"),
    "muted": ("#59636e", "#a5aeb8"),
    "line": ("#d3d9df", "#3b424b"),
    "empty": ("#e9edf1", "#2a3038"),
    "blue": ("#0b6cb3", "#63b3ec"),
    "orange": ("#c75300", "#f5964a"),
    "green": ("#08806a", "#3cc9a3"),
}
PAPER, INK, MUTED, LINE, EMPTY, BLUE, ORANGE, GREEN = (light for light, _ in PALETTE.values())
ON_LIGHT, ON_DARK = "#111111", "#fefefe"  # text on coloured cells: the same in both themes

WIDTH = 4.8  # inches: at 9 points readable on a phone, and two beside each other on a desk
PNG_DPI = 160

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.parse_math": False,  # task names are any text, dollar signs included
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.labelsize": 9.0,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "figure.facecolor": PAPER,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "sandhi",
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the house style, without touching matplotlib's settings for anyone else."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(_RC):
            return draw(*args, **kwargs)

    return drawn


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inches, that is tied to no window system."""
    return Figure(figsize=(width, height), layout="constrained")


def png_bytes(figure: Figure) -> bytes:
    """The figure on white paper."""
    with mpl.rc_context(_RC):
        return _saved(figure, format="png", dpi=PNG_DPI, metadata={"Software": None})


def inline_svg(figure: Figure, prefix: str) -> str:
    """The figure as an `<svg>` element for an HTML page: identifiers start with `prefix`, so that they are
    unique in the page; colours are the page's variables; no text survives outside of shapes."""
    with mpl.rc_context(_RC):
        text = _saved(figure, format="svg", facecolor="none", metadata=_NO_METADATA).decode()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)  # matplotlib repeats labels in comments
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    width, height = re.findall(r'\s(?:width|height)="([\d.]+)pt"', text)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    size = f'width="{width}pt" height="{height}pt"'
    text = text.replace("<svg", f'<svg {size} aria-hidden="true" focusable="false"', 1)
    for name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{name})")
    return text


def _saved(figure: Figure, **how: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, **how)
    return buffer.getvalue()


def label(text: str, width: int = 26) -> str:
    """A name as it can be drawn: shortened, and without characters that the font does not have. The report's
    tables give names in full."""
    font = get_font(findfont("DejaVu Sans"))
    drawable = "".join(c if font.get_char_index(ord(c)) else "\ufffd" for c in text)
    return drawable if len(drawable) <= width else drawable[: width - 1] + "…"
