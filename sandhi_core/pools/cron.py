"""When a pool is rebuilt: five fields as cron has them, read and held against a moment. Times are UTC.

A field is `*`, a number, a range `1-5`, either of the two others with a step `*/15`, or several of these with commas.
Left out of what cron programs take: names, macros such as `@daily`, and days of the month together with days of the
week, which some programs take for both and some for either.
"""

import re
from datetime import datetime

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))
_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_PART = re.compile(r"(?:\*|(\d{1,2})(?:-(\d{1,2}))?)(?:/(\d{1,2}))?", re.ASCII)


def times(text: str) -> tuple[frozenset[int], ...]:
    """The minutes, hours, days of the month, months and days of the week (Sunday is 0) at which `text` is due.

    Raises ValueError, in words that follow `rebuild`, where it is no such text or never due.
    """
    fields = text.split()
    if len(fields) != len(_FIELDS):
        raise ValueError(f"has {len(fields)} fields, not five: minute, hour, day of the month, month, day of the week")
    minutes, hours, days, months, weekdays = (
        _values(field, *known) for field, known in zip(fields, _FIELDS, strict=True)
    )
    if fields[2] != "*" and fields[4] != "*":
        raise ValueError("names days of the month and of the week; only one of the two may be other than *")
    if min(days) > max(_DAYS[month - 1] for month in months):
        raise ValueError("is never due: no such month has that day")
    return minutes, hours, days, months, frozenset(day % 7 for day in weekdays)


def plain(text: str) -> str:
    """The same as numbers with commas, or `*`: cron programs differ in what they make of `3-3`, or of Sunday as 7."""
    whole = [frozenset(range(first, last + 1)) for _, first, last in _FIELDS[:4]] + [frozenset(range(7))]
    return " ".join(
        "*" if values == every else ",".join(map(str, sorted(values)))
        for values, every in zip(times(text), whole, strict=True)
    )


def due(text: str, moment: datetime) -> bool:
    """Whether `text` is due in the minute of `moment`."""
    of_moment = (moment.minute, moment.hour, moment.day, moment.month, moment.isoweekday() % 7)
    return all(value in allowed for value, allowed in zip(of_moment, times(text), strict=True))


def _values(field: str, name: str, first: int, last: int) -> frozenset[int]:
    found: set[int] = set()
    for part in field.split(","):
        match = _PART.fullmatch(part)
        if match is None or (match[3] and match[1] and not match[2]):
            raise ValueError(f"has {part!r} for the {name}: a number, a range or *, the last two also with a step")
        start, end = int(match[1] or first), int(match[2] or match[1] or last)
        if not first <= start <= end <= last:
            raise ValueError(f"has {part!r} for the {name}, which goes from {first} to {last}")
        step = int(match[3] or 1)
        if step == 0:
            raise ValueError(f"has a step of 0 for the {name}")
        found |= set(range(start, end + 1, step))
    return frozenset(found)
