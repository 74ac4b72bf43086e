"""Numbers as people read them, the same in pictures, pages and the terminal."""

NOT_MEASURED = "not measured"


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves a digit before the point."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    whole = unit == "B" or abs(value) >= 100
    return f"{value:.0f} {unit}" if whole else f"{value:.2f} {unit}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def number(value: float) -> str:
    """A score in its metric's own unit: fractions with three decimals, larger ones with two."""
    return _signless_zero(f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}")


def signed(value: float) -> str:
    text = number(value)
    return f"+{text}" if float(text) > 0 else text


def points(value: float) -> str:
    """A change of a score between 0 and 1, in hundredths."""
    return _signless_zero(f"{100 * value:.1f}")


def brief(value: float) -> str:
    """Two digits for a small cell: .07, 1.2, 35."""
    if abs(value) >= 9.95:
        return f"{value:.0f}"
    if abs(value) >= 0.995:
        return f"{value:.1f}"
    text = _signless_zero(f"{value:.2f}")
    return "0" if text == "0.00" else text.replace("0.", ".", 1)


def _signless_zero(text: str) -> str:
    return text.lstrip("-") if float(text) == 0 else text


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def duration(seconds: float) -> str:
    """Hours, where there are any, minutes and seconds: 1:02:03, 0:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
