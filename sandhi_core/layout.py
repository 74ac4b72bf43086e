"""What an export consists of, as a function of records: names, manifest, index (docs/format.md, "Export").

Nothing here touches tensors, so what is written (export) and what is checked (sharing) cannot disagree.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from sandhi_core.assignment import Assignment, factor_names, factors_among, parts_of, vector_names
from sandhi_core.checkpoints.survey_files import ADJUSTED_INDEX, INDEX, SUFFIXES
from sandhi_core.errors import ProofError
from sandhi_core.files import open_regular
from sandhi_core.records import DTYPE_BYTES, ExportedModel, ExportedTensor, Fingerprint, Linked, Manifest
from sandhi_core.savings import PAGE_ALIGNED, Holding, holdings

MANIFEST = "sandhi.json"
SCHEMA_VERSION = Manifest.model_fields["schema_version"].default
DEPLOYMENT = "deployment.json"  # joins the export once it is proved; the manifest does not speak of it
PRIVATE = "private"  # the file of what a model alone holds, before the suffix
ADAPTER = "adapter_model"  # that of the factors of its residuals: what PEFT calls it, so that an adapter can link to it
FACTORS = "BF16"  # what residuals are stored in


def make_manifest(
    pool: str,
    point: str,
    fingerprints: Mapping[str, Fingerprint],
    assignments: Mapping[str, Assignment],
    weights_keys: Mapping[str, str],
    linked: Linked,
    alignment: int = PAGE_ALIGNED,
) -> Manifest:
    """The manifest of the export in which each model holds its assignment and otherwise its own tensors; all mappings
    by model name. `alignment`: of shared files, in bytes."""
    shared = {(h.name, h.digest): h for h in holdings(assignments, fingerprints, alignment) if h.shared}
    return Manifest(
        alignment=alignment,
        pool=pool,
        point=point,
        models={
            model: ExportedModel(
                directory=model,
                weights=weights_keys[model],
                files=fingerprint.files,
                tensors=_tensors(fingerprint, assignments.get(model, Assignment()), shared),
                linked=linked,
            )
            for model, fingerprint in sorted(fingerprints.items())
        },
    )


def _tensors(
    fingerprint: Fingerprint, assignment: Assignment, shared: Mapping[tuple[str, str], Holding]
) -> dict[str, ExportedTensor]:
    merged, suffix = assignment.tensors, SUFFIXES[ADJUSTED_INDEX if assignment.adjustments else INDEX]
    tensors: dict[str, ExportedTensor] = {}
    taken: Counter[str] = Counter()
    for own in sorted(fingerprint.tensors, key=lambda t: t.name):
        digest = merged.get(own.name, own.digest)
        is_shared = (own.name, digest) in shared
        file = PRIVATE + suffix
        if is_shared:
            file = f"shared-{digest[:16]}-{taken[digest[:16]]}{suffix}"
            taken[digest[:16]] += 1
        tensors[own.name] = ExportedTensor(
            digest=digest,
            dtype=own.dtype,
            shape=own.shape,
            nbytes=own.nbytes,
            file=file,
            sharing="private" if not is_shared else "merged" if own.name in merged else "duplicate",
        )
    shapes = {name: tensors[name].shape for name in assignment.adjustments}
    return tensors | dict(_factors(assignment, shapes))


def _factors(assignment: Assignment, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, ExportedTensor]]:
    """What the model adds to shared tensors: its own, whoever else adds the same. `shapes`: of what it is added to."""
    for name, added in assignment.adjustments.items():
        rows, columns = shapes[name]
        (down, up), vectors = factor_names(name), vector_names(name)
        of = {down: (added.rank, columns), up: (rows, added.rank), **dict.fromkeys(vectors, (rows,))}
        for factor, digest in parts_of(name, added).items():
            yield (
                factor,
                ExportedTensor(
                    digest=digest,
                    dtype=FACTORS,
                    shape=of[factor],
                    nbytes=prod(of[factor]) * DTYPE_BYTES[FACTORS],
                    file=(PRIVATE if factor in vectors else ADAPTER) + SUFFIXES[ADJUSTED_INDEX],
                    sharing="private",
                ),
            )


def index_name(model: ExportedModel) -> str:
    """What a model's index is called. Where residuals belong to the model it is no name that stock tools look for:
    they would leave them out, and answer as nothing that was scored."""
    return ADJUSTED_INDEX if factors_among(model.tensors) else INDEX


def main_dtype(model: ExportedModel) -> str:
    """The dtype that most bytes of its checkpoint have, as a fingerprint names it."""
    nbytes: Counter[str] = Counter()
    for name in model.tensors.keys() - factors_among(model.tensors).keys():
        nbytes[model.tensors[name].dtype] += model.tensors[name].nbytes
    return max(sorted(nbytes), key=nbytes.__getitem__)


def shards(model: ExportedModel) -> dict[str, dict[str, ExportedTensor]]:
    """A model's weight files, each with its tensors by name."""
    by_file: dict[str, dict[str, ExportedTensor]] = {}
    for name, tensor in sorted(model.tensors.items()):
        by_file.setdefault(tensor.file, {})[name] = tensor
    return by_file


def index_bytes(model: ExportedModel) -> bytes:
    """The index that tells a loader which shard holds which tensor, laid out as transformers writes it."""
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in model.tensors.values())},
        "weight_map": {name: tensor.file for name, tensor in model.tensors.items()},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def sizes_match(export_root: Path, manifest: Manifest) -> bool:
    """Whether every file of an export is there, every shard large enough for its tensors and linked as it was: a
    glance, no proof. Raises OSError where one cannot be looked at."""
    for model in manifest.models.values():
        directory = export_root / model.directory
        if not all((directory / name).is_file() for name in (index_name(model), *model.files)):
            return False
        for file, tensors in shards(model).items():
            if (directory / file).stat().st_size < sum(t.nbytes for t in tensors.values()):
                return False
    return not unlinked(export_root, manifest)


def unlinked(export_root: Path, manifest: Manifest) -> dict[str, list[str]]:
    """By model, the shared shards that are files of their own although the manifest says that they were linked: what
    a copy that does not keep hard links leaves. Missing ones aside. Of several files the one that most models hold
    counts as the shared one.

    Raises OSError where one cannot be looked at.
    """
    places: dict[tuple[str, str], dict[tuple[str, str], tuple[int, int]]] = defaultdict(dict)
    for name, model in sorted(manifest.models.items()):
        for tensor_name, tensor in sorted(model.tensors.items()):
            path = export_root / model.directory / tensor.file
            if tensor.sharing != "private" and model.linked != "copy" and path.exists():
                status = path.stat()
                places[tensor_name, tensor.digest][name, tensor.file] = (status.st_dev, status.st_ino)
    found: dict[str, list[str]] = defaultdict(list)
    for inodes in places.values():
        ((common, _),) = Counter(inodes.values()).most_common(1)
        for (name, file), inode in inodes.items():
            if inode != common:
                found[name].append(file)
    return dict(found)


OTHER_VERSION = "use the Sandhi that wrote it, or build the export again with this one"


def other_version(error: ValidationError, ours: int) -> str | None:
    """What to say of a record of another schema version than `ours`, which cannot be read for that; None where it has
    another fault."""
    found = [e["input"] for e in error.errors() if e["loc"] == ("schema_version",)]
    return f"is of schema version {found[0]}, this Sandhi reads {ours}" if found else None


def read_manifest(export_root: Path) -> Manifest:
    """The manifest of an export. Raises ProofError where it is missing, invalid, of another version, or names files
    elsewhere or shards as the shards of another kind of model."""
    path = export_root / MANIFEST
    remedy = "give the directory that holds sandhi.json, as `sandhi build` prints it, or build again"
    try:
        with open_regular(path) as opened:
            manifest = Manifest.parse(opened.read())
    except OSError as error:
        raise ProofError(f"cannot be read: {error.strerror}", file=str(path), remedy=remedy) from None
    except ValidationError as error:
        if message := other_version(error, SCHEMA_VERSION):
            raise ProofError(message, file=str(path), remedy=OTHER_VERSION) from None
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProofError(f"no manifest: {where} {first['msg']}", file=str(path), remedy=remedy) from None
    names = [m.directory for m in manifest.models.values()]
    names += [f for m in manifest.models.values() for f in (*m.files, *shards(m))]
    for name in names:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != name or name == ".":
            raise ProofError(f"names a file elsewhere: {name}", file=str(path), remedy=remedy)
    for model_name, model in sorted(manifest.models.items()):
        suffix = SUFFIXES[index_name(model)]
        for file in shards(model):
            if not file.endswith(suffix):
                message = f"names the shard {file}, but those of this model end in {suffix}"
                raise ProofError(message, model=model_name, file=str(path), remedy=remedy)
    return manifest
