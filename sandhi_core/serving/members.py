"""An export's servers as its deployment.json has them, and the commands that start them from where the export lies."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath

from sandhi_core.adapters import all_there
from sandhi_core.assignment import factors_among
from sandhi_core.deploy.bases import BaseServer
from sandhi_core.deploy.check import check_deployment
from sandhi_core.deploy.spec import DeploymentSpec, Engine, Server
from sandhi_core.deploy.vllm import FIRST_PORT, METRICS, PLUGIN
from sandhi_core.disk import LINKS, beside_weights
from sandhi_core.errors import PreflightError, ProofError, ServingError, UsageError
from sandhi_core.layout import DEPLOYMENT, MANIFEST, read_manifest, unlinked
from sandhi_core.records import Manifest
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.processes import VLLM, transformers_command

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
    options: tuple[str, ...]  # beside directory and address; the export's path is left open
    metrics: str | None  # path, for Prometheus
    maps: bool  # shared tensors, rather than copy them
    private_bytes: int  # of weights, that no other holds
    shared_bytes: int  # of weights, that others hold too
    kv_bytes: int | None  # of the cache; None leaves it to the engine

    @property
    def host_name(self) -> str:
        """Its name where names must be DNS labels that begin with a letter (RFC 1035)."""
        label = re.sub(r"[^a-z0-9]", "-", self.name.lower()).rstrip("-")
        return (label if label[0].isalpha() else f"m-{label}")[:63].rstrip("-")

    def command(self, export: PurePath, *, python: str, host: str, extra: Sequence[str] = ()) -> tuple[str, ...]:
        """What starts it where the export lies at `export`; `extra` comes last, so that it counts. To be run in that
        directory: `transformers serve` names a model by its path as given."""
        address = ("--host", host, "--port", str(self.port))
        if self.engine == "transformers":
            return transformers_command(Path(self.directory), self.port, python=python, host=host, extra=extra)
        options = (word.replace(_EXPORT, str(export)) for word in self.options)
        return (python, "-m", VLLM, "--model", str(export / self.directory), *options, *address, *extra)


_EXPORT = "\0"  # stands for the export's directory in options; no word of a command can hold it


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
    for model in manifest.models.values():
        MappedModel.open(root / model.directory)
    for name, files in unlinked(root, manifest).items():
        message = "is a file of its own: what models share would be in memory once for each"
        raise ProofError(message, model=name, file=files[0], remedy=LINKS)
    if not all_there(root, manifest):
        message = "a file of an adapter or a base is missing, or no link to the file of a model"
        raise ProofError(message, file=str(root), remedy=LINKS)
    return Deployed(root, manifest, DeploymentSpec.parse((root / DEPLOYMENT).read_bytes()))


def members(
    deployed: Deployed, *, engine: Engine | None = None, only: Collection[str] = (), port_base: int | None = None
) -> tuple[Member, ...]:
    """The servers in starting order: of all models, or those that answer for `only`. `engine`: another than the
    deployment's, for every model that is no adapter. Ports count from `port_base`, of all servers whether `only` names
    them or not.

    Raises UsageError for a model that is not there or ports beyond 65535, ServingError where the engine would leave
    out what a model adds to shared tensors.
    """
    known = deployed.manifest.models.keys()
    if unknown := sorted(set(only) - known):
        remedy = f"it holds {', '.join(sorted(known))}"
        raise UsageError(f"the export holds no model {', '.join(unknown)}", remedy=remedy)
    first = FIRST_PORT if port_base is None else port_base
    if not 0 < first <= 65535 - PLACES:
        raise UsageError(f"ports from {first} on", remedy=f"choose a first port from 1 to {65535 - PLACES}")
    found = tuple(_members(deployed, engine, first))
    chosen = tuple(member for member in found if not only or set(only) & set(member.models))
    for member in chosen:
        _refuse_left_out(deployed, member)
    return chosen


def _members(deployed: Deployed, engine: Engine | None, first: int) -> Iterator[Member]:
    spec = deployed.spec
    for place, base in enumerate(spec.bases):
        yield _base(base, first + place, spec.export)
    for place, server in enumerate(spec.servers, len(spec.bases)):
        yield _server(server, first + place, spec, engine or server.engine)


def _base(base: BaseServer, port: int, export: str) -> Member:
    return Member(
        name=base.base,
        models=tuple(adapted.model for adapted in base.models),
        directory=base.base,
        engine="vllm",
        port=port,
        options=_options(base.command, export),
        metrics=base.metrics,
        maps=False,
        private_bytes=base.memory.weights_bytes + base.memory.adapter_bytes,
        shared_bytes=0,
        kv_bytes=_kv_bytes(base.command),
    )


def _server(server: Server, port: int, spec: DeploymentSpec, engine: Engine) -> Member:
    if engine == server.engine == "vllm":
        options = _options(server.command, spec.export)
    else:
        options = ("--served-model-name", server.model, "--dtype", server.dtype, *PLUGIN) if engine == "vllm" else ()
    return Member(
        name=server.model,
        models=(server.model,),
        directory=server.directory,
        engine=engine,
        port=port,
        options=options,
        metrics=METRICS if engine == "vllm" else None,
        maps=engine == "transformers" or PLUGIN[0] in options,
        private_bytes=server.memory.private_bytes,
        shared_bytes=server.memory.shared_bytes,
        kv_bytes=_kv_bytes(options),
    )


def _options(command: Sequence[str], export: str) -> tuple[str, ...]:
    """What follows `vllm serve DIRECTORY` in a command of a deployment, but for the port; the export's path in it is
    left open."""
    words = list(command[3:])
    at = words.index("--port")
    del words[at : at + 2]
    return tuple(word.replace(f"={export}/", f"={_EXPORT}/") for word in words)


def _kv_bytes(options: Sequence[str]) -> int | None:
    given = dict(pairwise(options)).get("--kv-cache-memory-bytes")
    return None if given is None else int(given)


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
