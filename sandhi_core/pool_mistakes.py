"""What is wrong in a pool file that reads as YAML, in words for whoever wrote it."""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sandhi_core.pool_file import Loc, shown


def sentences(error: ValidationError) -> Iterator[tuple[Loc, str]]:
    """Where each of pydantic's errors is, and what it says."""
    details = error.errors(include_url=False, include_input=False)
    for detail in details:
        loc = detail["loc"]
        if detail["type"] == "too_short" and any(d["loc"][:-1][: len(loc)] == loc for d in details):
            continue  # pydantic counts only entries without mistakes
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        yield loc, f"{place if place.isprintable() and len(place) <= 80 else shown(place)} {_fault(detail)}"


def _fault(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is no field of a pool file"
        case "too_short":
            return "must list at least one"
        case "string_type":
            return "must be text; quote it"
        case "string_pattern_mismatch" if detail["loc"][-1] == "name":
            return "must be letters, digits, - and _, beginning with a letter or digit"
        case "value_error":
            return str(detail["ctx"]["error"])
        case _:
            return detail["msg"].removeprefix("Input ").removeprefix("String ").replace("should", "must")


def between_fields(data: dict[str, Any]) -> Iterator[tuple[Loc, str]]:
    """Mistakes that no single field shows, found in what was written: a mistake elsewhere hides none."""
    models = [entry if isinstance(entry, dict) else {} for entry in _list(data.get("models"))]
    yield from _alike(models)
    search = data.get("search")
    # Under SANDHI's own rule drift may add up past the tolerance; under the other nothing goes beyond it.
    if not isinstance(search, dict) or search.get("accept") == "reference":
        return
    tolerance = search.get("tolerance")
    if not isinstance(tolerance, int | float):
        return
    for model in models:
        entries = [entry for entry in _list(model.get("tasks")) if isinstance(entry, dict)]
        budgets = [budget for e in entries if isinstance(budget := e.get("budget"), int | float)]
        if budgets and tolerance < max(budgets):
            unused = f"is below a budget of {max(budgets)}, which could never be used"
            yield ("search", "tolerance"), f"search.tolerance {unused}"


def _alike(models: list[dict[str, Any]]) -> Iterator[tuple[Loc, str]]:
    seen: dict[str, str] = {}
    for index, name in enumerate(model.get("name") for model in models):
        if isinstance(name, str):
            slug = re.sub(r"[^a-z0-9]", "_", name.casefold())
            if slug in seen:
                told = f"name {shown(name)} cannot be told from {shown(seen[slug])} in file and asset names"
                yield ("models", index, "name"), told
            seen.setdefault(slug, name)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
