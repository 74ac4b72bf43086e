"""An export's servers as its deployment.json has them, and the commands that start them from where the export lies."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from sandhi_core.adapters import all_there
from sandhi_core.assignment import factors_among
from sandhi_core.deploy import vllm
from sandhi_core.deploy.bases import BaseServer
from sandhi_core.deploy.check import check_deployment
from sandhi_core.deploy.spec import DeploymentSpec, Server
from sandhi_core.disk import LINKS, beside_weights
from sandhi_core.errors import PreflightError, ProofError, ServingError, UsageError
from sandhi_core.layout import DEPLOYMENT, MANIFEST, read_manifest, unlinked
from sandhi_core.pools.pool import Engine
from sandhi_core.records import Manifest
from sandhi_core.serving.gpu import Device, socket_path
from sandhi_core.serving.mapped import CONFIG, MappedModel
from sandhi_core.serving.processes import transformers_command
from sandhi_core.serving.slices import matrices
from sandhi_core.serving.vllm_plugin.flags import EXTRA_CONFIG, NONE, settings_from_flags
from sandhi_core.serving.vllm_plugin.provider import opened as opened_model
from sandhi_core.serving.vllm_plugin.refuse import require_heads, require_servable

PLACES = 1000
"""Ports from the first on that servers of one pool may take."""


@dataclass(frozen=True)
class Deployed:
    """An export that was proved, and what it is served from."""

    root: Path
    manifest: Manifest
    spec: DeploymentSpec


@dataclass(frozen=True)
class Member:
    """One server. Its name is the model's, or the base's; sizes are bytes."""

    name: str
    models: tuple[str, ...]  # names that it answers by
    directory: str  # relative to the export
    engine: Engine
    port: int
    options: tuple[str, ...]  # beside directory, adapters and address
    metrics: str | None  # path, for Prometheus
    maps: bool  # shared tensors, rather than copy them
    private_bytes: int  # of weights, that no other holds
    shared_bytes: int  # of weights, that others hold too
    adapters: Mapping[str, str] = field(default_factory=dict)  # directories in the export, by model
    ranks: int = 1  # of tensor parallelism
    owner: str | None = None  # sockets of the processes that have to own what it maps, before it starts (gpu.RANK)

    @property
    def host_name(self) -> str:
        """Its name where names must be DNS labels that begin with a letter (RFC 1035)."""
        label = re.sub(r"[^a-z0-9]", "-", self.name.lower()).rstrip("-")
        return (label if label[0].isalpha() else f"m-{label}")[:63].rstrip("-")

    def command(self, export: PurePath, *, python: str, host: str) -> tuple[str, ...]:
        """What starts it where the export lies at `export`. To be run in that directory: `transformers serve` names a
        model by its path as given."""
        if self.engine == "transformers":
            return transformers_command(Path(self.directory), self.port, python=python, host=host, extra=self.options)
        return vllm.command(
            export, self.directory, self.options, self.port, python=python, host=host, adapters=self.adapters
        )


def opened(export: Path) -> Deployed:
    """Open a proved export, before anything is started from it.

    Raises ProofError and CheckpointError where the manifest cannot be read, or a file is missing, has another size or
    header than it says, or is linked otherwise; PreflightError where deployment.json is missing or is not what follows
    from it, or a file beside the weights is not what was exported.
    """
    root = export.resolve()
    if not (root / MANIFEST).is_file():
        raise UsageError(f"{export} holds no {MANIFEST}", remedy="give the directory of a whole export")
    manifest = read_manifest(root)
    problems = [problem for problem in check_deployment(root, manifest) if problem.severity == "error"]
    for name, model in sorted(manifest.models.items()):
        problems += beside_weights(root, name, model)  # small, and a tokenizer or a configuration changes answers too
    if problems:
        raise PreflightError(problems)
    for _ in MappedModel.each(root, manifest):  # it raises where files are not what the manifest says
        pass
    for name, files in unlinked(root, manifest).items():
        message = "is a file of its own: what models share would be in memory once for each"
        raise ProofError(message, model=name, file=files[0], remedy=LINKS)
    if not all_there(root, manifest):
        message = "a file of an adapter or a base is missing, or no link to the file of a model"
        raise ProofError(message, file=str(root), remedy=LINKS)
    return Deployed(root, manifest, DeploymentSpec.parse((root / DEPLOYMENT).read_bytes()))


def needed(deployed: Deployed, engine: Engine | None = None, only: Collection[str] = ()) -> Engine:
    """The engine whose Python the servers need and whose options may be added, given what `members` takes: vLLM where
    it is that of any of them. `transformers serve` runs with its Python too."""
    found = {engine or server.engine for server in deployed.spec.servers if not only or server.model in only}
    bases = (m.model for base in deployed.spec.bases for m in base.models)
    return "vllm" if "vllm" in found or any(not only or m in only for m in bases) else "transformers"


def members(
    deployed: Deployed,
    *,
    engine: Engine | None = None,
    only: Collection[str] = (),
    port_base: int | None = None,
    device: Device = "cpu",
    extra: Sequence[str] = (),
    environment: Mapping[str, str] = NONE,
) -> tuple[Member, ...]:
    """The servers in starting order: of all models, or those that answer for `only`. `engine`: another than the
    deployment's, for every model that is no adapter. Ports count from `port_base`, of all servers whether `only` names
    them or not. `device`: what engines compute on. `extra`: options after their own, so that they count, of all servers
    of `needed`: no two engines have the same. `environment`: variables that engines will be given.

    Raises UsageError for a model that is not there or ports beyond 65535, ServingError where the engine would leave
    out what a model adds to shared tensors, PreflightError where the plugin cannot serve a model with its options.
    """
    known = deployed.manifest.models.keys()
    if unknown := sorted(set(only) - known):
        remedy = f"it holds {', '.join(sorted(known))}"
        raise UsageError(f"the export holds no model {', '.join(unknown)}", remedy=remedy)
    first = vllm.FIRST_PORT if port_base is None else port_base
    if not 0 < first <= 65535 - PLACES:
        raise UsageError(f"ports from {first} on", remedy=f"choose a first port from 1 to {65535 - PLACES}")
    takes = needed(deployed, engine, only)
    found = (m for m in _members(deployed, engine, first) if not only or set(only) & set(m.models))
    chosen = [replace(m, options=(*m.options, *extra)) if m.engine == takes else m for m in found]
    for member in chosen:
        _refuse_left_out(deployed, member)
        if member.engine == "vllm" and not member.maps:
            require_heads(member.name, json.loads((deployed.root / member.directory / CONFIG).read_text()), device)
    path = socket_path(first)
    return tuple(
        _mapping(deployed, m, device, path, environment) if m.maps and m.engine == "vllm" else m for m in chosen
    )


def _mapping(deployed: Deployed, member: Member, device: Device, path: str, environment: Mapping[str, str]) -> Member:
    """A member whose engine has the plugin, on this device: on a GPU it is told its owner, by default one at `path`."""
    settings = settings_from_flags(member.options, device, environment)
    if device == "cuda" and settings.options.owner is None:
        given = json.dumps({"digests": settings.options.digests, "owner": path})
        member = replace(
            member, options=(*member.options, EXTRA_CONFIG, given), ranks=settings.tensor_parallel, owner=path
        )
        settings = settings_from_flags(member.options, device, environment)
    model, config = opened_model(deployed.root / member.directory)
    require_servable(model.model, config, matrices(model.tensors, model.shared()), settings)
    return member


def _members(deployed: Deployed, engine: Engine | None, first: int) -> Iterator[Member]:
    spec = deployed.spec
    for place, base in enumerate(spec.bases):
        yield _base(base, first + place)
    for place, server in enumerate(spec.servers, len(spec.bases)):
        yield _server(server, first + place, engine or server.engine)


def _base(base: BaseServer, port: int) -> Member:
    return Member(
        name=base.base,
        models=tuple(adapted.model for adapted in base.models),
        directory=base.base,
        engine="vllm",
        port=port,
        options=base.options,
        adapters=base.adapters,
        metrics=base.metrics,
        maps=False,
        private_bytes=base.memory.weights_bytes + base.memory.adapter_bytes,
        shared_bytes=0,
    )


def _server(server: Server, port: int, engine: Engine) -> Member:
    if engine == server.engine:
        options = server.options
    else:
        options = vllm.served([server.model], server.dtype, plugin=True) if engine == "vllm" else ()
    return Member(
        name=server.model,
        models=(server.model,),
        directory=server.directory,
        engine=engine,
        port=port,
        options=options,
        metrics=vllm.METRICS if engine == "vllm" else None,
        maps=engine == "transformers" or vllm.PLUGIN[0] in options,
        private_bytes=server.memory.private_bytes,
        shared_bytes=server.memory.shared_bytes,
    )


def _refuse_left_out(deployed: Deployed, member: Member) -> None:
    if member.engine != "transformers":
        return
    for name in member.models:
        if factors_among(deployed.manifest.models[name].tensors):
            raise ServingError(
                "adds residuals to shared tensors, which `transformers serve` would leave out",
                model=name,
                remedy="serve it with --engine vllm and the plugin, or load it with sandhi_core.serving.load",
            )
