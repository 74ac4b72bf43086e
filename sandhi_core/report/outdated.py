"""How far a page is of the pool file as it stands: models that are not in the export, stages that are stale."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from sandhi_core.graph import STAGES, Node
from sandhi_core.report.data import ReportData


def outdated(data: ReportData) -> tuple[str, ...]:
    """A sentence of everything in which it is not; none where the pool is built as its file says."""
    return (*_models(data), *_stages(data))


def _models(data: ReportData) -> Iterator[str]:
    wanted = {model.name for model in data.pool.models}
    held = wanted if data.manifest is None else set(data.manifest.models)
    if missing := sorted(wanted - held):
        yield f"Models of the pool file that are not in the export: {', '.join(missing)}."
    if gone := sorted(held - wanted):
        yield f"Models of the export that are no longer in the pool file: {', '.join(gone)}."


def _stages(data: ReportData) -> Iterator[str]:
    every = {model.name for model in data.pool.models}
    for what, nodes in (
        ("Never ran", data.never),
        ("Stale", data.stale),
        ("Made from what is stale, and may change with it", data.waiting),
    ):
        if nodes:
            yield f"{what}: {'; '.join(_by_stage(nodes, every))}."


def _by_stage(nodes: Iterable[Node], every: set[str]) -> Iterator[str]:
    about: dict[str, list[str]] = defaultdict(list)
    for stage, key in nodes:
        about[stage].append(key.rpartition(".")[2] if STAGES[stage].scope == "member" else key)
    for stage, names in about.items():
        if STAGES[stage].scope == "pool":
            yield stage
        else:
            yield f"{stage} of {'all models' if every == set(names) else ', '.join(names)}"
