"""deployment.json held to the export beside it: what follows from the export is derived again and compared.

Only what was measured elsewhere is taken from the file: scores, steps, the digests of the originals and of the proof,
the device's size, and with what memory was measured. Notes for people are no figures.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from sandhi_core.claims import claims_of
from sandhi_core.deploy.bases import Adapted, Scored
from sandhi_core.deploy.spec import DeploymentSpec, Server, serve
from sandhi_core.disk import unreadable
from sandhi_core.errors import Problem, SandhiError
from sandhi_core.layout import DEPLOYMENT, OTHER_VERSION, main_dtype, other_version
from sandhi_core.pools.pool import Engine
from sandhi_core.records import ExportedModel, Manifest

AGAIN = f"restore {DEPLOYMENT} from where the export was built, or remove it and build again"
_WORDS = ("notes", "basis")
_SHOWN = 100  # characters of a value that are worth a line


def check_deployment(export_root: Path, manifest: Manifest) -> list[Problem]:
    """Everything in which an export's deployment.json is not what follows from its manifest and configurations. A
    missing or damaged file is a problem too, never an exception."""
    path = export_root / DEPLOYMENT
    if what := unreadable(path):
        return [_problem(f"{what}: nothing says that this export was proved", remedy="build again, or " + AGAIN)]
    try:
        spec = DeploymentSpec.parse(path.read_bytes())
    except ValidationError as error:
        if message := other_version(error, DeploymentSpec.model_fields["schema_version"].default):
            return [_problem(message, remedy=OTHER_VERSION)]
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return [_problem(f"is no deployment specification: {where + ': ' if where else ''}{first['msg']}")]
    if spec.manifest != manifest.digest:
        return [_problem(f"is of manifest {spec.manifest}, the export's is {manifest.digest}")]
    served = sorted(scored.model for scored in _served(spec))
    if served != sorted(manifest.models):
        return [_problem(f"serves {', '.join(served)}; the export holds {', '.join(sorted(manifest.models))}")]
    try:
        derived = _derived(spec, manifest, export_root)
    except SandhiError as error:
        return [error.problem]
    problems = [_differs(*found) for found in _differences(_figures(spec), _figures(derived))]
    problems += _memory(spec, manifest)
    problems += _moved(spec, export_root)
    return problems


def _derived(spec: DeploymentSpec, manifest: Manifest, export_root: Path) -> DeploymentSpec:
    """`spec` with everything that follows from the export put in its place. What was proved was saved on the disk:
    no more and no less than is claimed. Raises as `deployment_spec` does."""
    claims = claims_of(manifest)
    counted = {"checkpoint_bytes": claims.checkpoint_bytes, "duplicates": claims.duplicates}
    counted |= {"claimed": claims.claimed, "verified_disk": claims.claimed}
    derived = spec.model_copy(
        update={
            "pool": manifest.pool,
            "point": manifest.point,
            "stock": manifest.stock,
            "claims": spec.claims.model_copy(update=counted),
        }
    )
    configs = {name: _config(export_root, model) for name, model in manifest.models.items()}
    if not all(configs.values()):
        return derived  # sizes of caches are not known
    dtypes = {name: main_dtype(model) for name, model in manifest.models.items()}
    scored = {s.model: Scored(s.original, s.scored_dtype, s.steps, s.tasks) for s in _served(spec)}
    served = serve(
        _engines(spec, manifest),
        spec.plugin,
        Path(spec.export),
        manifest,
        configs,
        dtypes,
        spec.memory.device_bytes,
        scored,
    )
    return derived.model_copy(update=served._asdict())


def _engines(spec: DeploymentSpec, manifest: Manifest) -> dict[str, Engine]:
    """By model what the pool asks for, which its servers say. Beside adapters no model has an engine of its own."""
    own = {} if manifest.stock is not None else {server.model: server.engine for server in spec.servers}
    return dict.fromkeys(manifest.models, spec.engine) | own


def _served(spec: DeploymentSpec) -> list[Server | Adapted]:
    """Every model, as an adapter or on a server of its own."""
    return [*spec.servers, *(model for base in spec.bases for model in base.models)]


def _config(export_root: Path, model: ExportedModel) -> dict[str, Any]:
    """A model's configuration as exported; empty where the file is no longer that one, which `verify_disk` tells."""
    path = export_root / model.directory / "config.json"
    data = b"" if unreadable(path) else path.read_bytes()
    if hashlib.sha256(data).hexdigest() != model.files.get("config.json"):
        return {}
    config: dict[str, Any] = json.loads(data)
    return config


def _figures(spec: DeploymentSpec) -> dict[str, Any]:
    """The specification's values: servers and bases by name, and the order of the servers."""
    values = spec.model_dump(mode="json")
    servers = values.pop("servers")
    order = [server["model"] for server in servers]
    bases = {base["base"]: base for base in values.pop("bases")}
    return values | {"starting order": order, "servers": dict(zip(order, servers, strict=True)), "bases": bases}


def _differences(found: Any, derived: Any, *where: str) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(found, Mapping) and isinstance(derived, Mapping):
        for key in sorted(found.keys() | derived.keys()):
            if key not in _WORDS:
                yield from _differences(found.get(key), derived.get(key), *where, key)
    elif found != derived:
        yield where, found, derived


def _differs(where: tuple[str, ...], found: Any, derived: Any) -> Problem:
    model = where[1] if where[0] == "servers" else None
    says, gives = (json.dumps(value, ensure_ascii=False) for value in (found, derived))
    if max(len(says), len(gives)) > _SHOWN:
        return _problem(f"{'.'.join(where)} is not what follows from the export", model)
    return _problem(f"{'.'.join(where)} is {says}, the export gives {gives}", model)


def _memory(spec: DeploymentSpec, manifest: Manifest) -> Iterator[Problem]:
    """A measurement cannot be derived, but no proof passes with less than a part of the claim, or counts more."""
    counted, found = claims_of(manifest), spec.claims.verified_memory
    if not counted.least_in_memory <= found <= counted.claimed:
        yield _problem(
            f"claims.verified_memory is {found}, a proof of this export gives "
            f"{max(counted.least_in_memory, 0)} to {counted.claimed}"
        )


def _moved(spec: DeploymentSpec, export_root: Path) -> Iterator[Problem]:
    try:
        there = Path(spec.export).resolve() == export_root.resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all
        there = False
    if not there:
        yield _problem(
            f"its commands serve from {spec.export}, not from here",
            remedy="put this directory into the commands, or serve from there",
            severity="warning",
        )


def _problem(
    message: str, model: str | None = None, remedy: str = AGAIN, severity: Literal["error", "warning"] = "error"
) -> Problem:
    return Problem(code="deployment", severity=severity, model=model, file=DEPLOYMENT, message=message, remedy=remedy)
