"""Rules of a pool file that no single field shows. They look at what was written, not at what was validated: a
mistake hides none but those about the value that it is in.
"""

import re
from collections.abc import Callable, Collection, Iterator
from sys import float_info
from typing import Any, NamedTuple, TypeGuard

from sandhi_core.pools.problems import Fault, Loc, shown

_FRACTION = re.compile(
    r"(\w+_)?(acc|f1|em|exact_match|recall|precision)(_\w+)?|\w*accuracy\w*|mc[12]|pass[_@]\w+|contains|likelihood"
)


def is_fraction(metric: str) -> bool:
    """Whether values of an lm-eval metric (`acc`, or `acc,filter`) lie between 0 and 1, as far as its name tells."""
    return _FRACTION.fullmatch(metric.partition(",")[0].strip().lower()) is not None


UNSURE = object()
"""Stands for a value of which it is not known what was meant."""


class _Written(NamedTuple):
    """The document, and the places in it at which it is not known what was meant."""

    data: dict[str, Any]
    unsure: Collection[Loc]

    def at(self, loc: Loc, default: object) -> Any:
        """What a section says of a field; UNSURE where that, or a part of it, or the section is."""
        section, field = loc
        if any(place == loc[:1] or place[:2] == loc for place in self.unsure):
            return UNSURE
        part = self.data.get(str(section))
        return part.get(field, default) if isinstance(part, dict) else default


def broken_rules(
    data: dict[str, Any], line: Callable[[Loc], int], unsure: Collection[Loc] = frozenset()
) -> Iterator[Fault]:
    """What breaks a rule in the document `data`; `line` tells where in the file a value stands. Rules between sections
    say nothing of what is `unsure` (mistakes)."""
    written = _Written(data, unsure)
    models = [entry if isinstance(entry, dict) else {} for entry in _list(data.get("models"))]
    yield from _alike(models, line)
    tasks = [
        (("models", m, "tasks", t), task)
        for m, model in enumerate(models)
        for t, task in enumerate(_list(model.get("tasks")))
        if isinstance(task, dict)
    ]
    for loc, task in tasks:
        metric, budget = task.get("metric"), task.get("budget")
        if isinstance(metric, str) and is_fraction(metric) and _is_number(budget) and budget >= 1:
            message = f"budget {budget:g} allows any drop: {shown(metric)} is never above 1"
            yield Fault((*loc, "budget"), message, _as_fraction(budget))
    yield from _tolerance(written, [task for _, task in tasks])
    yield from _combined(written)
    yield from _own_engines(written, models)
    yield from _applied(written, models)
    yield from _methods(written)
    yield from _errors(written)


_ENGINES = ("vllm", "transformers")
_SET = object()  # any value that is written

_COMBINED: tuple[tuple[Loc, object, Loc, object, object], ...] = (
    (("merging", "residuals"), "low_rank", ("search", "strategy"), "walk", "ladder"),
    (("merging", "affine"), "rows", ("search", "strategy"), "walk", "ladder"),
    (("deploy", "adapters"), _SET, ("merging", "residuals"), "none", "low_rank"),
    (("deploy", "adapters"), _SET, ("merging", "affine"), "none", "none"),
    (("deploy", "adapters"), _SET, ("deploy", "engine"), "vllm", "vllm"),
    (("deploy", "plugin"), True, ("deploy", "engine"), "vllm", "vllm"),
    (("search", "strategy"), "ladder", ("grouping", "candidates"), "wide", "wide"),
    (("grouping", "besides"), _SET, ("search", "strategy"), "walk", "ladder"),
    (("profile", "noise"), False, ("search", "strategy"), "walk", "ladder"),
    # A ladder looks for the budgets themselves, in whole assignments.
    (("search", "tolerance"), _SET, ("search", "strategy"), "walk", "walk"),
    (("search", "accept"), "reference", ("search", "strategy"), "walk", "walk"),
    (("search", "stride"), 1, ("search", "strategy"), "walk", "walk"),
    (("search", "early_rejection"), True, ("search", "strategy"), "walk", "walk"),
    (("merging", "reform"), True, ("search", "strategy"), "walk", "ladder"),
)
"""A value that needs another elsewhere: the field and its value, the other field, its default, what it must be."""


def _combined(written: _Written) -> Iterator[Fault]:
    for loc, value, other, default, needed in _COMBINED:
        given, found = written.at(loc, None), written.at(other, default)
        if UNSURE in (given, found):
            continue
        if given not in (None, []) and (value is _SET or given == value) and found != needed:
            name, wanted = ".".join(map(str, loc)), ".".join(map(str, other))
            shows = name if isinstance(given, dict) else f"{name}: {_said(given)}"
            yield Fault(
                loc,
                f"{shows} needs {wanted}: {needed}, not {found}",
                f"set {wanted}: {needed}, or leave {name} out",
            )


def _methods(written: _Written) -> Iterator[Fault]:
    """What the methods of `merging` go with."""
    loc = ("merging", "methods")
    methods, bases = written.at(loc, ["mean"]), written.at(("merging", "bases"), None)
    if not (isinstance(methods, list) and methods):
        return
    named = f"merging.methods: {', '.join(map(str, methods))}"
    if "base" in methods and not bases:
        yield Fault(loc, "merging.methods: base needs merging.bases", "name the checkpoints there, or leave base out")
    if bases and bases is not UNSURE and "base" not in methods:
        yield Fault(("merging", "bases"), f"merging.bases is of no use to {named}", "add base to merging.methods")
    if methods == ["mean"]:
        return
    if written.at(("merging", "rescale"), "none") == "common":
        yield Fault(
            ("merging", "rescale"),
            f"merging.rescale: common needs merging.methods: mean alone, not {named}",
            "leave rescale out, or name mean alone",
        )
    if written.at(("grouping", "candidates"), "wide") == "reference":
        message = f"grouping.candidates: reference needs merging.methods: mean alone, not {named}"
        yield Fault(("grouping", "candidates"), message, "set grouping.candidates: wide, or name mean alone")
    if written.at(("merging", "reform"), False) is True and not {"mean", "regmean"} & set(map(str, methods)):
        message = f"merging.reform leaves models out of averages, and {named} has none"
        yield Fault(("merging", "reform"), message, "add mean or regmean, or leave reform out")


def _errors(written: _Written) -> Iterator[Fault]:
    """Errors are looked at by ladders, and where methods are compared."""
    methods = written.at(("merging", "methods"), None)
    one = methods is not UNSURE and len(_list(methods)) < 2
    unused = one and written.at(("search", "strategy"), "walk") == "walk"
    if unused and written.at(("search", "errors"), "answers") == "outputs":
        message = "search.errors: outputs needs search.strategy: ladder, not walk, or several merging.methods"
        yield Fault(("search", "errors"), message, "set search.strategy: ladder, or leave search.errors out")


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value).lower()


def _own_engines(written: _Written, models: list[dict[str, Any]]) -> Iterator[Fault]:
    """Which models become adapters of a base is found by the search, and only vLLM serves a base."""
    if written.at(("deploy", "adapters"), None) in (None, UNSURE):
        return
    remedy = "leave the engine out, put the model into a pool of its own, or leave deploy.adapters out"
    for at, model in enumerate(models):
        if (engine := model.get("engine")) in _ENGINES:
            yield Fault(
                ("models", at, "engine"), f"a model's own engine ({engine}) goes with no deploy.adapters", remedy
            )


def _applied(written: _Written, models: list[dict[str, Any]]) -> Iterator[Fault]:
    """What models add to shared tensors needs something that applies it: vLLM's plugin, our loader, or for residuals
    alone stock vLLM where they are adapters."""
    own = [model.get("engine") for model in models]
    default = written.at(("deploy", "engine"), "vllm")
    stock = (
        "vllm" in [engine or default for engine in own or [None]] and written.at(("deploy", "plugin"), True) is False
    )
    if not stock or written.at(("deploy", "adapters"), None) is not None:
        return
    where = "engine" if "vllm" in own else "deploy.engine"
    remedy = f"leave deploy.plugin out, or set {where}: transformers"
    if written.at(("merging", "residuals"), "none") == "low_rank":
        message = "merging.residuals: low_rank is not applied by vLLM with deploy.plugin: false"
        adapters = ", or deploy.adapters: {max_rank: 64} for adapters that it serves"
        yield Fault(("merging", "residuals"), message, remedy + adapters)
    if written.at(("merging", "affine"), "none") == "rows":
        message = "merging.affine: rows is not applied by vLLM with deploy.plugin: false"
        yield Fault(("merging", "affine"), message, remedy)


def _as_fraction(points: float) -> str:
    if points == 1 or points >= 100:
        return "budgets are absolute, as fractions: 0.05 is five points"
    return f"budgets are absolute, as fractions: {points / 100:g} is {points:g} points"


def _tolerance(written: _Written, tasks: list[dict[str, Any]]) -> Iterator[Fault]:
    loc = ("search", "tolerance")
    tolerance, accept = written.at(loc, None), written.at(("search", "accept"), "original")
    if not _is_number(tolerance):
        return
    metrics = [metric for task in tasks if isinstance(metric := task.get("metric"), str)]
    if tolerance >= 1 and metrics and all(map(is_fraction, metrics)):
        yield Fault(loc, f"search.tolerance {tolerance:g} allows any drop", _as_fraction(tolerance))
    # Under SANDHI's own rule drift may add up past the tolerance; under the other nothing goes beyond it.
    largest = max((budget for task in tasks if _is_number(budget := task.get("budget"))), default=0)
    if accept not in ("reference", UNSURE) and tolerance < largest:
        message = f"search.tolerance is below a budget of {largest}, which could never be used"
        yield Fault(loc, message, "raise it to the largest budget, or remove it")


def _alike(models: list[dict[str, Any]], line: Callable[[Loc], int]) -> Iterator[Fault]:
    seen: dict[str, tuple[str, Loc]] = {}
    for index, name in enumerate(model.get("name") for model in models):
        if isinstance(name, str):
            loc = ("models", index, "name")
            slug = re.sub(r"[^a-z0-9]", "_", name.casefold())
            first, at = seen.setdefault(slug, (name, loc))
            if at == loc:
                continue
            if first == name:
                message = f"name {shown(name)} is used twice; the first is on line {line(at)}"
            else:
                message = f"name {shown(name)} cannot be told from {shown(first)} in file and asset names"
            yield Fault(loc, message, "give each model a name of its own")


def _is_number(value: Any) -> TypeGuard[float]:
    """A number that can be a budget: neither infinite nor, as integers may be, beyond all floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
