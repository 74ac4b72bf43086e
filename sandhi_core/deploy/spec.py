"""The deployment specification: what to start, what was proved of it, and how much memory that leaves.

Only bytes that were scored and proved are described. What cannot be known before a server runs is marked as
an estimate, with what it rests on.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from sandhi_core.adapters import told
from sandhi_core.assignment import factors_among
from sandhi_core.deploy import library, vllm
from sandhi_core.deploy.bases import BaseServer, Scored, base_servers, rounding
from sandhi_core.deploy.launch import Launch
from sandhi_core.deploy.sizing import ModelMemory, PoolMemory, capacity, memory_of
from sandhi_core.deploy.stock import StockMemory, stock_memory
from sandhi_core.errors import ProofError
from sandhi_core.files import write_atomic, writing
from sandhi_core.layout import DEPLOYMENT
from sandhi_core.pools.pool import Engine, Pool
from sandhi_core.records import (
    ExportedModel,
    Fingerprint,
    HoldoutScore,
    HoldoutTask,
    Manifest,
    OperatingPoints,
    Part,
    Record,
    SharingProof,
    StockPlan,
)

ENGINES: Mapping[Engine, ModuleType] = {"vllm": vllm, "transformers": library}
"""Each with `residuals`, `served_dtype`, `launch`, `command` and `pool_notes`."""


class Claims(Part):
    """Bytes, as the proof has them; never one for another."""

    checkpoint_bytes: int
    duplicates: int
    claimed: int
    verified_disk: int
    verified_memory: int
    measured_with: str  # whose processes were measured


class Server(Part):
    """One model and how it is served."""

    model: str
    engine: Engine
    directory: str  # relative to the export
    weights: str  # the name under which the holdout scored exactly these weights
    original: str  # digest of the fingerprint of the checkpoint it was made from
    steps: int  # how far along its trajectory
    tasks: dict[str, HoldoutTask]
    port: int | None
    options: tuple[str, ...]  # of the engine, beside directory and address
    metrics: str | None  # the path on that port at which Prometheus reads what the server counts
    dtype: str
    scored_dtype: str  # as the pool file asks
    max_model_len: int | None  # tokens
    shell: str  # the command that serves it from where the export was built, quoted for a shell
    memory: ModelMemory
    notes: tuple[str, ...]


class DeploymentSpec(Record):
    """Everything a pool is served from: `bases`, then `servers`, both in starting order. Every model is in one of them.
    `stock` says which models are adapters, and why the others are none."""

    schema_version: Literal[2] = 2
    pool: str
    point: str
    engine: Engine  # the pool's; each server has its own
    plugin: bool  # whether vLLM is the one with Sandhi's plugin; false where it serves no model
    export: str  # absolute
    manifest: str
    proof: str
    claims: Claims
    memory: PoolMemory
    servers: tuple[Server, ...]
    stock: StockPlan | None = None
    stock_memory: StockMemory | None = None
    bases: tuple[BaseServer, ...] = ()
    notes: tuple[str, ...]

    @property
    def rounding(self) -> tuple[str, ...]:
        """How models are scored in another dtype than they are served in, each sentence once; empty where in none."""
        dtypes = [(server.scored_dtype, server.dtype) for server in self.servers]
        dtypes += [(model.scored_dtype, base.dtype) for base in self.bases for model in base.models]
        return tuple(dict.fromkeys(note for scored, served in dtypes for note in rounding(scored, served)))


class Served(NamedTuple):
    """The sizes of a pool on its device, and its servers in starting order."""

    memory: PoolMemory
    servers: tuple[Server, ...]
    stock_memory: StockMemory | None = None
    bases: tuple[BaseServer, ...] = ()


def deployment_spec(
    pool: Pool,
    manifest: Manifest,
    export_root: Path,
    configs: Mapping[str, Mapping[str, Any]],
    proof: SharingProof,
    holdouts: Mapping[str, HoldoutScore],
    points: OperatingPoints,
    fingerprints: Mapping[str, Fingerprint],
) -> DeploymentSpec:
    """Describe how to serve an export; mappings are by model name, `configs` holds each one's config.json.

    Raises ProofError unless the proof passed for this very manifest and the holdout scored these very
    weights, and for residuals or a dtype that the engine cannot serve; CheckpointError where a configuration does not
    give the cache's size.
    """
    _refuse_unproved(manifest, proof, holdouts)
    export_root = export_root.absolute()
    asked = pool.evaluation.dtype
    scored = {
        name: Scored(fingerprints[name].digest, asked, holdouts[name].steps, holdouts[name].tasks)
        for name in manifest.models
    }
    dtypes = {name: fingerprints[name].dtype for name in manifest.models}
    plugin = "vllm" in pool.engines.values() and pool.deploy.plugin
    served = serve(pool.engines, plugin, export_root, manifest, configs, dtypes, pool.deploy.device_bytes, scored)
    return DeploymentSpec(
        pool=pool.name,
        point=points.deployed.name,
        engine=pool.deploy.engine,
        plugin=plugin,
        export=str(export_root),
        manifest=manifest.digest,
        proof=proof.digest,
        claims=_claims(proof),
        memory=served.memory,
        servers=served.servers,
        stock=manifest.stock,
        stock_memory=served.stock_memory,
        bases=served.bases,
        notes=tuple(_notes(pool.deploy.engine, plugin, manifest.stock, served)),
    )


def serve(
    asked: Mapping[str, Engine],
    plugin: bool,
    export_root: Path,
    manifest: Manifest,
    configs: Mapping[str, Mapping[str, Any]],
    dtypes: Mapping[str, str],
    device_bytes: int,
    scored: Mapping[str, Scored],
) -> Served:
    """How a pool is served; `asked`: by model the engine that the pool asks for, `plugin`: whether vLLM has Sandhi's.
    Raises as `deployment_spec` does."""
    engines = {name: _engine(asked[name], plugin, name, manifest) for name in manifest.models}
    _refuse_residuals(engines, plugin, manifest)
    served = {name: ENGINES[engines[name]].served_dtype(name, dtypes[name]) for name in manifest.models}
    memory, models = memory_of(device_bytes, manifest, configs, dtypes)
    stock: StockMemory | None = None
    bases: tuple[BaseServer, ...] = ()
    given, alone = memory, models  # what the commands of whole models go by
    if manifest.stock is not None:
        stock, sizes = stock_memory(device_bytes, manifest, manifest.stock, configs, dtypes, models)
        bases = base_servers(manifest, manifest.stock, export_root, configs, served, scored, stock, sizes)
        given = _beside_bases(memory, stock)
        alone = {name: _room(models[name], stock.share_bytes) for name in manifest.stock.ordinary}
    # The largest starts while most of the device is free.
    order = sorted(alone, key=lambda name: (-models[name].weights_bytes, name))
    servers = []
    for place, name in enumerate(order, len(bases)):
        launch = ENGINES[engines[name]].launch(name, place, served[name], configs[name], given, alone[name], plugin)
        model = manifest.models[name]
        servers.append(_server(name, engines[name], export_root, model, scored[name], launch, models[name]))
    return Served(memory, tuple(servers), stock, bases)


def _beside_bases(memory: PoolMemory, stock: StockMemory) -> PoolMemory:
    """The pool's sizes where a part of it is served as adapters. What other models share is not taken off."""
    fits, weights = stock.fits, stock.weights_bytes
    sides = {"fits_before": fits, "fits_after": fits, "weights_bytes_before": weights, "weights_bytes_after": weights}
    return memory.model_copy(update=sides)


def _room(memory: ModelMemory, share: int) -> ModelMemory:
    room = capacity(share, memory.kv)
    return memory.model_copy(update={"before": room, "after": room})


def _engine(engine: Engine, plugin: bool, name: str, manifest: Manifest) -> Engine:
    """What serves a model: where adapters were asked for, and it has residuals without being one, whatever applies
    them."""
    plan = manifest.stock
    adds = bool(factors_among(manifest.models[name].tensors))
    left = plan is not None and name in plan.ordinary and adds and not ENGINES[engine].residuals(plugin)
    return "transformers" if left else engine


def _notes(engine: Engine, plugin: bool, plan: StockPlan | None, served: Served) -> Iterator[str]:
    if plan is None:
        yield from _notes_by_engine(plugin, served)
        return
    yield f"{told(plan)}; each base and its adapters are one server, which holds the base once"
    if served.stock_memory is not None:
        yield from ENGINES[engine].pool_notes(_beside_bases(served.memory, served.stock_memory), plugin)
    if any(server.engine != engine for server in served.servers):
        yield "models with residuals that are no adapters are served by our loader:"
        yield from library.NOTES


def _notes_by_engine(plugin: bool, served: Served) -> Iterator[str]:
    """Of each engine that occurs; of two, with the models that it serves."""
    models = {e: [server.model for server in served.servers if server.engine == e] for e in get_args(Engine)}
    for engine, names in models.items():
        if 0 < len(names) < len(served.servers):
            yield f"{', '.join(names)}, served by {engine}:"
        if names:
            yield from ENGINES[engine].pool_notes(served.memory, plugin)


def _refuse_residuals(engines: Mapping[str, Engine], plugin: bool, manifest: Manifest) -> None:
    for name, model in sorted(manifest.models.items()):
        engine = engines[name]
        if factors_among(model.tensors) and manifest.stock is None and not ENGINES[engine].residuals(plugin):
            raise ProofError(
                f"adds residuals to shared tensors, which {engine} without the plugin does not apply",
                model=name,
                remedy="set deploy.plugin to true, its engine or deploy.engine to transformers "
                "(sandhi_core.serving.load applies them), or merging.residuals to none, and build again",
            )


def _refuse_unproved(manifest: Manifest, proof: SharingProof, holdouts: Mapping[str, HoldoutScore]) -> None:
    if not proof.passed:
        raise ProofError(
            f"the sharing proof of pool {proof.pool} did not pass: {'; '.join(proof.problems)}",
            remedy="resolve what the proof lists and build again",
        )
    if proof.manifest != manifest.digest:
        raise ProofError(
            f"the proof is of another export (manifest {proof.manifest}, not {manifest.digest})",
            remedy="materialise sharing_proof again",
        )
    for name, model in manifest.models.items():
        if model.weights != holdouts[name].weights:
            raise ProofError(
                f"the export holds {model.weights}, the holdout scored {holdouts[name].weights}",
                model=name,
                remedy="materialise merged_weights and sharing_proof again",
            )


def _server(
    name: str,
    engine: Engine,
    export_root: Path,
    model: ExportedModel,
    scored: Scored,
    launch: Launch,
    memory: ModelMemory,
) -> Server:
    command = ENGINES[engine].command(export_root, model.directory, launch.options, launch.port)
    return Server(
        model=name,
        engine=engine,
        directory=model.directory,
        weights=model.weights,
        original=scored.original,
        steps=scored.steps,
        tasks=scored.tasks,
        port=launch.port,
        options=launch.options,
        metrics=launch.metrics,
        dtype=launch.dtype,
        scored_dtype=scored.dtype,
        max_model_len=launch.max_model_len,
        shell=shlex.join(command),
        memory=memory,
        notes=(*launch.notes, *rounding(scored.dtype, launch.dtype)),
    )


def _claims(proof: SharingProof) -> Claims:
    return Claims(
        checkpoint_bytes=proof.checkpoint_bytes,
        duplicates=proof.duplicates,
        claimed=proof.claimed,
        verified_disk=proof.verified_disk,
        verified_memory=proof.verified_memory,
        measured_with=proof.memory.engine,
    )


def write_deployment(export_root: Path, spec: DeploymentSpec) -> Path:
    """Write the specification beside the export's manifest, laid out for people; returns its path."""
    path = export_root / DEPLOYMENT
    text = json.dumps(spec.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False)
    data = text.encode() + b"\n"
    with writing(path, len(data)):
        write_atomic(path, data, mode=0o444)
    return path
