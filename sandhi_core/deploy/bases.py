"""The servers of models that are adapters of common bases: one vLLM a base, which answers by the models' names."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sandhi_core.adapters import adapted_modules
from sandhi_core.deploy import vllm
from sandhi_core.deploy.stock import BaseMemory, StockMemory
from sandhi_core.records import Adapter, ExportedModel, HoldoutTask, Manifest, Part, StockPlan


class Adapted(Part):
    """One model that is served as an adapter of a base, or where it adds nothing as the base itself."""

    model: str
    adapter: str | None  # its directory, relative to the export
    rank: int
    nbytes: int
    weights: str  # as of a server
    original: str
    steps: int
    tasks: dict[str, HoldoutTask]
    scored_dtype: str


class BaseServer(Part):
    """One base, how it is served with its adapters, and the models that answer there by their names."""

    base: str  # its directory, relative to the export
    models: tuple[Adapted, ...]
    port: int | None
    options: tuple[str, ...]  # as of a server, beside the adapters
    metrics: str | None  # as of a server
    dtype: str
    max_model_len: int | None  # tokens
    shell: str  # as of a server
    memory: BaseMemory
    notes: tuple[str, ...]

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters' directories, by the names of their models."""
        return {model.model: model.adapter for model in self.models if model.adapter is not None}


class Scored(NamedTuple):
    """What a specification says of a model from elsewhere than the export."""

    original: str  # digest of the fingerprint
    dtype: str  # as the pool file asks
    steps: int
    tasks: dict[str, HoldoutTask]


def base_servers(
    manifest: Manifest,
    plan: StockPlan,
    export_root: Path,
    configs: Mapping[str, Mapping[str, Any]],
    served: Mapping[str, str],
    scored: Mapping[str, Scored],
    pool: StockMemory,
    sizes: Mapping[str, BaseMemory],
) -> tuple[BaseServer, ...]:
    """The servers of a plan, in starting order. `configs`, `served` (the dtype, by vLLM's name) and `scored` are by
    model name, `sizes` by directory of the base."""
    found = []
    order = sorted(plan.bases, key=lambda base: (-sizes[base.directory].weights_bytes, base.directory))
    for place, base in enumerate(order):
        first, memory = next(iter(base.adapters)), sizes[base.directory]
        modules = adapted_modules(base, manifest.models)
        launch = vllm.launch_base(base, modules, place, served[first], configs[first], pool, memory)
        adapters = {name: a.directory for name, a in base.adapters.items() if a.directory is not None}
        command = vllm.command(export_root, base.directory, launch.options, launch.port, adapters=adapters)
        models = tuple(_adapted(name, a, manifest.models[name], scored[name]) for name, a in base.adapters.items())
        asked = sorted({scored[name].dtype for name in base.adapters})
        found.append(
            BaseServer(
                base=base.directory,
                models=models,
                port=launch.port,
                options=launch.options,
                metrics=launch.metrics,
                dtype=launch.dtype,
                max_model_len=launch.max_model_len,
                shell=shlex.join(command),
                memory=memory,
                notes=(*launch.notes, *(note for dtype in asked for note in rounding(dtype, launch.dtype))),
            )
        )
    return tuple(found)


def _adapted(name: str, adapter: Adapter, model: ExportedModel, scored: Scored) -> Adapted:
    return Adapted(
        model=name,
        adapter=adapter.directory,
        rank=adapter.rank,
        nbytes=adapter.nbytes,
        weights=model.weights,
        original=scored.original,
        steps=scored.steps,
        tasks=scored.tasks,
        scored_dtype=scored.dtype,
    )


def rounding(scored: str, served: str) -> Iterator[str]:
    if scored != served:
        how = "float32 on a CPU, the weights' own dtype elsewhere" if scored == "auto" else scored
        yield f"scored in {how}; served in {served}, answers near a tie can differ by rounding"
