"""Which tensor of a checkpoint is which projection, and which projections may share a tensor.

Every tensor must be accounted for: a projection (a slot), an expert (private), an embedding, head, norm or
bias, or a known buffer. One that is unknown or missing would be silently dropped or silently random in some
loader, so it is an error. Owners' names are kept, with or without `model.` in front (as a save of the base
class has them).
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandhi_core.checkpoints.architectures import ORDER, Experts, Matrix
from sandhi_core.checkpoints.checkpoint import refuse
from sandhi_core.checkpoints.meaning import EMBEDDING, HEAD, Meaning
from sandhi_core.checkpoints.survey_files import HeaderEntry
from sandhi_core.errors import CheckpointError, Problem
from sandhi_core.records import DTYPE_BYTES, Component, Slot, digest_of

FINAL_NORM = "norm.weight"
_BUFFER = re.compile(r"(.+\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_LAYER = re.compile(r"layers\.([0-9]{1,6})\.")
_RESAVE = "save the whole model again with save_pretrained"


@dataclass(frozen=True)
class _Wanted:
    """A tensor that the configuration asks for; a slot of the search where it is a `projection`."""

    shape: tuple[int, ...]
    layer: int = -1
    projection: str = ""
    component: Component = "attn"
    private: bool = False


@dataclass
class _Reading:
    """A checkpoint's names held against its configuration; `found` has the wanted tensors that are there."""

    meaning: Meaning
    found: dict[str, _Wanted] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def report(self, code: str, message: str, remedy: str, name: str, file: str | None = None) -> None:
        self.problems.append(
            Problem(
                code=code,
                severity="error",
                model=self.meaning.model,
                file=file,
                tensor=name,
                message=message,
                remedy=remedy,
            )
        )


def group_key(config: Mapping[str, Any], dtype: str) -> str:
    """A coarse compatibility group such as `h128-bf16`: models in different ones never share a projection.

    Raises CheckpointError where the configuration has no hidden size.
    """
    hidden = config.get("hidden_size")
    if type(hidden) is not int or hidden < 1:
        raise CheckpointError(
            f"has no hidden_size ({hidden!r})",
            file="config.json",
            remedy="take the file from the model's source again; a text model's is needed",
            code="config-invalid",
        )
    return f"h{hidden}-{dtype.lower().replace('_', '-')}"


def layer_count(model: str, config: dict[str, Any]) -> int:
    """Number of decoder layers. Raises CheckpointError for a configuration that cannot be loaded."""
    return Meaning(model, config).layers


def problems_of(model: str, config: dict[str, Any], headers: Mapping[str, HeaderEntry]) -> list[Problem]:
    """Everything wrong with the tensors that are there, from configuration and headers alone."""
    try:
        return _read(Meaning(model, config), headers).problems
    except CheckpointError as error:
        return [error.problem]


def slots(
    model: str, config: dict[str, Any], headers: Mapping[str, HeaderEntry], digests: Mapping[str, str]
) -> tuple[tuple[Slot, ...], tuple[str, ...]]:
    """A model's slots, by layer and then q k v o gate up down, and the names of private weights.

    Two slots have the same key iff their projection, shape, dtype and meaning agree (see meaning); layer
    numbers and names need not. Raises CheckpointError for the first problem, also where embeddings and head
    are tied but the file holds a head with other bytes.
    """
    reading = _read(Meaning(model, config), headers)
    _compare_head(reading, headers, digests)
    if reading.problems:
        raise refuse(reading.problems[0])
    shareable = [
        Slot(
            model=model,
            layer=wanted.layer,
            projection=wanted.projection,
            component=wanted.component,
            tensor=name,
            digest=digests[name],
            nbytes=headers[name].nbytes,
            key=_key(reading.meaning, wanted, headers[name]),
        )
        for name, wanted in reading.found.items()
        if wanted.projection
    ]
    shareable.sort(key=lambda s: (s.layer, ORDER.index(s.projection)))
    return tuple(shareable), tuple(sorted(n for n, w in reading.found.items() if w.private))


def beside(
    model: str,
    config: dict[str, Any],
    headers: Mapping[str, HeaderEntry],
    digests: Mapping[str, str],
    kinds: Collection[str],
) -> tuple[Slot, ...]:
    """What lies beside the projections of a model with sound tensors and may be shared too, of these `kinds` of
    component: by layer (-1 outside of all), then name. A tied head is no slot of its own: it is the embedding.

    Keys are as those of `slots`; what embeddings must agree in besides is the vocabulary (see besides).
    """
    meaning = Meaning(model, config)
    found = []
    for name, wanted in _read(meaning, headers).found.items():
        if wanted.projection or wanted.private or wanted.component not in kinds or (name == HEAD and meaning.tied):
            continue
        short = _LAYER.sub("", name.removeprefix("model."), count=1)
        found.append(
            Slot(
                model=model,
                layer=wanted.layer,
                projection=short,
                component=wanted.component,
                tensor=name,
                digest=digests[name],
                nbytes=headers[name].nbytes,
                key=digest_of([short, headers[name].shape, headers[name].dtype, meaning.beside(short, wanted.layer)]),
            )
        )
    return tuple(sorted(found, key=lambda s: (s.layer, s.projection)))


def _key(meaning: Meaning, wanted: _Wanted, header: HeaderEntry) -> str:
    means = meaning.of(wanted.component, wanted.layer)
    return digest_of([wanted.projection, header.shape, header.dtype, means])


def _compare_head(reading: _Reading, headers: Mapping[str, HeaderEntry], digests: Mapping[str, str]) -> None:
    if not reading.meaning.tied or HEAD not in headers:
        return
    embedding = next(n for n in (f"model.{EMBEDDING}", EMBEDDING, HEAD) if n in headers)
    if digests[HEAD] != digests[embedding]:
        reading.report(
            "head-differs",
            "differs from the embeddings, but config.json ties the two: some loaders use it, some do not",
            "set tie_word_embeddings to false where this head is meant, or remove it from the file",
            HEAD,
            headers[HEAD].file,
        )


# --- names --------------------------------------------------------------------------------------------------


def _read(meaning: Meaning, headers: Mapping[str, HeaderEntry]) -> _Reading:
    reading = _Reading(meaning)
    prefix = "model." if any(name.startswith("model.") for name in headers) else ""
    present = {int(m[1]) for n in headers if (m := _LAYER.match(n.removeprefix(prefix)))}
    present &= set(range(meaning.layers))
    if not present:
        model_type = meaning.config["model_type"]
        message = f"no tensor has a name that a {model_type} model's layers have; this is the first"
        reading.report("tensor-unknown", message, _RESAVE, next(iter(headers), "none"))
        return reading
    if absent := sorted(set(range(meaning.layers)) - present):
        message = f"config.json says {meaning.layers} layers; of {_some(absent)} there is no tensor"
        reading.report("tensor-missing", message, _RESAVE, f"{prefix}layers.{absent[0]}")
    wanted = dict(_outside_layers(meaning, prefix, HEAD in headers))
    for layer in sorted(present):
        wanted |= _layer(meaning, layer, f"{prefix}layers.{layer}.", headers)
    for name, want in wanted.items():
        _compare(reading, name, want, headers.get(name))
    for name, header in headers.items():
        if name not in wanted and not _BUFFER.fullmatch(name):
            reading.report("tensor-unknown", _why_unknown(meaning, name, prefix), _RESAVE, name, header.file)
    return reading


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _outside_layers(meaning: Meaning, prefix: str, has_head: bool) -> Iterator[tuple[str, _Wanted]]:
    table = (meaning.size("V"), meaning.size("H"))
    yield f"{prefix}{EMBEDDING}", _Wanted(table, component="embeddings")
    yield f"{prefix}{FINAL_NORM}", _Wanted((meaning.size("H"),), component="norms")
    if has_head or not meaning.tied:
        yield HEAD, _Wanted(table, component="embeddings")


def _layer(meaning: Meaning, layer: int, prefix: str, headers: Mapping[str, HeaderEntry]) -> dict[str, _Wanted]:
    """The tensors of one layer by name."""
    architecture, biased = meaning.architecture, meaning.biased()
    wanted = {
        f"{prefix}{m}.weight": _Wanted(_shape(meaning, dims), layer, component="norms")
        for m, dims in architecture.norms.items()
    }
    parts: list[tuple[Component, Mapping[str, Matrix]]] = [("attn", architecture.attention)]
    if meaning.sparse[layer]:
        wanted |= _experts(meaning, prefix, headers)
    else:
        parts.append(("mlp", architecture.mlp))
    for component, modules in parts:
        for module, (projection, *dims) in modules.items():
            shape = _shape(meaning, dims)
            wanted[f"{prefix}{module}.weight"] = _Wanted(shape, layer, projection, component)
            if module in biased:
                wanted[f"{prefix}{module}.bias"] = _Wanted(shape[:1], layer, component="norms")
    return wanted


def _experts(meaning: Meaning, prefix: str, headers: Mapping[str, HeaderEntry]) -> dict[str, _Wanted]:
    """A layer's experts, as the file stores them: one by one or stacked."""
    ways = [_stored(meaning, prefix, experts) for experts in meaning.architecture.experts]
    return next((way for way in ways if all(n in headers for n in way)), ways[0])


def _stored(meaning: Meaning, prefix: str, experts: Experts) -> dict[str, _Wanted]:
    tensors: dict[str, Sequence[str]] = {f"{experts.router}.weight": ("E", "H")}
    for module, dims in experts.separate.items():
        tensors |= {f"{module.format(n)}.weight": dims for n in range(meaning.dims["E"])}
    tensors |= experts.stacked
    return {f"{prefix}{n}": _Wanted(_shape(meaning, dims), private=True) for n, dims in tensors.items()}


def _shape(meaning: Meaning, dims: Sequence[str]) -> tuple[int, ...]:
    return tuple(meaning.size(dim) for dim in dims)


def _compare(reading: _Reading, name: str, want: _Wanted, header: HeaderEntry | None) -> None:
    if header is None:
        untied = " (config.json does not tie it to the embeddings)" if name == HEAD else ""
        reading.report("tensor-missing", f"is missing{untied}: loaders would make it up", _RESAVE, name)
        return
    if header.shape != want.shape:
        message = f"has shape {header.shape}, but config.json asks for {want.shape}"
        remedy = "use the config.json that belongs to these weights"
        reading.report("tensor-shape", message, remedy, name, header.file)
    if header.dtype not in DTYPE_BYTES:
        message = f"has dtype {header.dtype}; only unquantised weights can be averaged"
        remedy = f"use the unquantised checkpoint ({', '.join(DTYPE_BYTES)})"
        reading.report("quantised", message, remedy, name, header.file)
    reading.found[name] = want


def _why_unknown(meaning: Meaning, name: str, prefix: str) -> str:
    model_type = meaning.config["model_type"]
    layer = _LAYER.match(name.removeprefix(prefix))
    if layer and int(layer[1]) >= meaning.layers:
        return f"is of layer {int(layer[1])}, but config.json says {meaning.layers} layers"
    if name.endswith(".bias"):
        return f"is a bias that a {model_type} model with this config.json does not have"
    return f"is no tensor that a {model_type} model with this config.json has: loaders would drop it"
