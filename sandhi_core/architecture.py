"""Which tensor of a checkpoint is which projection, and which projections may share a tensor.

Every tensor must be accounted for: a projection (a slot), an expert (private), an embedding, head, norm or
bias, or a known buffer. One that is unknown or missing would be silently dropped or silently random in some
loader, so it is an error. Owners' names are kept, with or without `model.` in front (a save of the base class).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandhi_core.architectures import ORDER
from sandhi_core.checkpoint import refuse
from sandhi_core.errors import CheckpointError, Problem
from sandhi_core.meaning import Meaning
from sandhi_core.records import DTYPE_BYTES, Component, Slot, digest_of
from sandhi_core.survey_files import HeaderEntry

EMBEDDING, HEAD, FINAL_NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
_BUFFER = re.compile(r"(.+\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_LAYER = re.compile(r"layers\.(\d+)\.")
_RESAVE = "save the whole model again with save_pretrained"


@dataclass(frozen=True)
class _Wanted:
    """A tensor that the configuration asks for."""

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


def _key(meaning: Meaning, wanted: _Wanted, header: HeaderEntry) -> str:
    means = meaning.attention(wanted.layer) if wanted.component == "attn" else meaning.mlp()
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
    if not any(name.startswith(f"{prefix}layers.") for name in headers):
        first = next(iter(headers), "none")
        reading.report("tensor-unknown", "no tensor has a name of this model type", _RESAVE, first)
        return reading
    present = {int(m[1]) for name in headers if (m := _LAYER.match(name.removeprefix(prefix)))}
    absent = [layer for layer in range(meaning.layers) if layer not in present]
    if absent:
        which = f"layers {', '.join(map(str, absent[:8]))}{' and more' * (len(absent) > 8)}"
        message = f"no tensor of {which} is there, but config.json says {meaning.layers} layers"
        reading.report("tensor-missing", message, _RESAVE, f"{prefix}layers.{absent[0]}.")
    wanted: dict[str, _Wanted] = dict(_outside_layers(meaning, prefix, HEAD in headers))
    for layer in sorted(present - set(range(meaning.layers), ) ^ present):
        wanted |= _layer(meaning, layer, f"{prefix}layers.{layer}.", headers)
    return reading
