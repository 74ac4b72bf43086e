"""What is wrong in a pool file that reads as YAML, in words for whoever wrote it."""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sandhi_core.pools.problems import LOOK_UP, MOST, Fault, FieldError, Loc, shown

FORMATS = {
    "name": ("must be letters, digits, - and _, beginning with a letter or digit", "choose such a name"),
    "device": ("must be auto, cpu, mps, cuda, or cuda: and a number", "write a device such as cuda:0"),
    "cache_memory": ("must be a size in MiB, GiB, MB or GB", "write a size such as 2GiB, or leave it out"),
    "device_memory": ("must be a size in MiB, GiB, MB or GB", "write a size such as 80GiB"),
}
_NO_LINE = ("must be text of at least one character, without line breaks or control characters", "correct it")
_WHY = {
    "max_rank": "choose one of these: vLLM takes no others for --max-lora-rank",
    "budget": "allow at least one question to be lost: no number of questions shows that nothing changed",
}
_NUMBER = re.compile(r"\s*([-+]?[0-9]*[.,]?[0-9]+([eE][-+]?[0-9]+)?)\s*(%?)\s*")
_SHAPES = {
    "model_type": "a mapping of fields to values",
    "tuple_type": "a list",
    "float_type": "a number",
    "int_type": "a whole number",
}
_WRITE = {
    "model_type": "write `field: value` a line, indented below it, or remove it",
    "tuple_type": "write its items as `- item`, one a line, or between [ and ]",
    "float_type": "write a number such as 0.02",
    "int_type": "write a whole number such as 1",
}


def faults(error: ValidationError, pool: type[BaseModel]) -> Iterator[Fault]:
    """Pydantic's errors in our words, of very many the first ones. `pool` is the model that was validated: it knows
    which fields there are."""
    details = error.errors(include_url=False)[: MOST + 1]
    meant = {field for detail in details for field in _misnamed(detail, pool)}
    for detail in details:
        loc = detail["loc"]
        if detail["type"] == "too_short" and any(d["loc"][:-1][: len(loc)] == loc for d in details):
            continue  # pydantic counts only entries without mistakes
        if detail["type"] == "missing" and loc in meant:
            continue
        message, remedy = _words(detail, pool)
        yield Fault(loc, f"{place(loc)} {message}", remedy)


def unsure(error: ValidationError, pool: type[BaseModel]) -> set[Loc]:
    """Where pydantic's errors leave open what was meant: values that are wrong, and fields that are there by a mistaken
    name or in a mistaken place."""
    details = error.errors(include_url=False)[: MOST + 1]
    return {loc for detail in details for loc in (detail["loc"], *_misnamed(detail, pool))}


def _misnamed(detail: ErrorDetails, pool: type[BaseModel]) -> Iterator[Loc]:
    """The fields that an unknown one may be meant for."""
    if detail["type"] == "extra_forbidden":
        *above, unknown = detail["loc"]
        if meant := _meant(detail, pool):
            yield (*above, meant)
        for section in _homes(str(unknown), pool):
            yield (*section, str(unknown))


def place(loc: Loc) -> str:
    """A value's place, such as `models[0].tasks`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    return text if text.isprintable() and len(text) <= 80 else shown(text)


def _words(detail: ErrorDetails, pool: type[BaseModel]) -> tuple[str, str]:
    """Message and remedy of one of pydantic's errors."""
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    field = str(detail["loc"][-1]) if detail["loc"] else ""
    match kind:
        case "missing":
            return "is required", "add it"
        case "extra_forbidden":
            homes = list(_homes(field, pool))
            what = "stands in the wrong place" if homes else "is no field of a pool file"
            return what, _instead(field, _meant(detail, pool), homes)
        case "literal_error":
            choices = str(context["expected"])
            return f"must be {choices}", _WHY.get(field) or _choice(given, re.findall(r"'([^']*)'", choices))
        case "greater_than" if field in _WHY:
            return f"must be greater than {context['gt']:g}", _WHY[field]
        case "too_short":
            return "must list at least one", "add one"
        case "too_long":
            return "lists too many", f"leave at most {context['max_length']}"
        case "model_type" | "tuple_type" | "float_type" | "int_type":
            if given is None:
                return "is empty", _WRITE[kind]
            return f"must be {_SHAPES[kind]}", _as_number(given) or _WRITE[kind]
        case "bool_type":
            return "is empty" if given is None else "must be true or false", "write true or false, without quotes"
        case "string_type" if given is None or field not in ("device", "cache_memory", "device_memory"):
            return ("is empty", "give it a value") if given is None else ("must be text", "put quotes around it")
        case "string_type" | "string_pattern_mismatch":
            return FORMATS.get(field, _NO_LINE)
        case "value_error" if isinstance(refused := context["error"], FieldError):
            return str(refused), refused.remedy
    message = detail["msg"].removeprefix("Input ").removeprefix("String ").replace("should", "must")
    return message, f"choose another value; {LOOK_UP}"


def _meant(detail: ErrorDetails, pool: type[BaseModel]) -> str | None:
    """The field that an unknown one is most like, among those of its section."""
    *above, unknown = detail["loc"]
    section: type[BaseModel] | None = pool
    for part in above:
        if isinstance(part, str) and section is not None:
            section = _section(section.model_fields[part].annotation)
    return _closest(str(unknown), list(section.model_fields)) if section else None


def _homes(field: str, section: type[BaseModel], *above: str) -> Iterator[Loc]:
    """Where a field of this name belongs: the sections of one mapping each that have it."""
    for name, info in section.model_fields.items():
        if (inner := _section(info.annotation)) and get_origin(info.annotation) is not tuple:
            if field in inner.model_fields:
                yield (*above, name)
            yield from _homes(field, inner, *above, name)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section in an annotation such as `tuple[ModelEntry, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner))), None)


def _closest(written: str, known: list[str]) -> str | None:
    return next(iter(get_close_matches(written.lower()[:80], known, n=1, cutoff=0.65)), None)


def _instead(written: str, meant: str | None, homes: Iterable[Loc]) -> str:
    if re.match(r"\w+:", written):
        return "put a space after the colon"
    if there := " or ".join(map(place, homes)):
        return f"write it below {there}" + (f", or did you mean {meant}?" if meant else "")
    return f"did you mean {meant}?" if meant else f"remove it; {LOOK_UP}"


def _choice(given: Any, choices: list[str]) -> str:
    meant = _closest(given, choices) if isinstance(given, str) else None
    return f"did you mean {meant}?" if meant else "choose one of these"


def _as_number(given: Any) -> str | None:
    """How to write what stands in quotes, or with a per cent sign or a comma."""
    if not isinstance(given, str) or len(given) > 80 or not (found := _NUMBER.fullmatch(given)):
        return None
    number, _, per_cent = found.groups()
    if per_cent:
        return f"write {float(number.replace(',', '.')) / 100:g}"
    return "write a decimal point" if "," in number else "remove the quotes"
