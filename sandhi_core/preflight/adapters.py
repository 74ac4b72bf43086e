"""Which models can be adapters of no base, whatever a search finds: told before anything is scored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sandhi_core.adapters import READ
from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.errors import Problem
from sandhi_core.grouping.besides import besides
from sandhi_core.pools.pool import ModelEntry, Pool
from sandhi_core.records import Component, Fingerprint

OUT = "or leave deploy.adapters out"


@dataclass(frozen=True)
class _Tensor:
    """`home`: what others must agree in to share one with it, None where nothing may; `component`: its kind."""

    shape: tuple[object, ...]
    digest: str
    home: tuple[object, ...] | None = None
    component: Component | None = None

    def can_become(self, other: "_Tensor") -> bool:
        """Whether one tensor may take the place of both."""
        return self.home is not None and self.home == other.home


Held = Mapping[str, _Tensor]
"""A model's tensors by name, in the order of the fingerprint."""


def never_adapters(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    """A warning for every model that has no other to share a base with, where the pool asks for adapters and all of its
    models can be read. (Models without a warning may still turn out to be none.)"""
    if pool.deploy.adapters is None or len(pool.models) > len(fingerprints):
        return
    held = {entry.name: _held(entry, fingerprints[entry.name]) for entry in pool.models}
    files = {m: {f: digest for f, digest in found.files.items() if f in READ} for m, found in fingerprints.items()}
    for model, own in held.items():
        like = [m for m, theirs in held.items() if m != model and _shapes(own) == _shapes(theirs)]
        if not like:
            yield _warning(model, "no other model has tensors of the same names and shapes", f"serve it apart, {OUT}")
            continue
        apart = {m: [name for name in own if not _may_equal(own[name], held[m][name], pool)] for m in like}
        nearest = min(like, key=lambda m: (len(apart[m]), files[m] != files[model]))
        if apart[nearest]:
            first = apart[nearest][0]
            message = f"differs from that of {nearest}, and may not be shared ({len(apart[nearest])} such in all)"
            yield _warning(model, message, _advice(own[first], held[nearest][first]), tensor=first)
        elif files[nearest] != files[model]:
            first = min(f for f in READ if files[nearest].get(f) != files[model].get(f))
            message = f"its {first} is another than that of {nearest}"
            yield _warning(model, message, f"give both the same file, if they answer alike with it, {OUT}")


def _held(entry: ModelEntry, fingerprint: Fingerprint) -> Held:
    beside = besides(Checkpoint.open(resolve(entry), entry.name), fingerprint, ("norms", "embeddings"))
    homes: dict[str, tuple[tuple[object, ...], Component]] = {
        s.tensor: ((s.layer, s.key, beside.vocabulary if s.component == "embeddings" else ""), s.component)
        for s in (*fingerprint.slots, *beside.slots)
    }
    tensors = {t.name: t for t in fingerprint.tensors}
    return {
        name: _Tensor((tensors[name].shape, tensors[name].dtype), tensors[name].digest, *homes.get(name, ()))
        for name in fingerprint.in_order
    }


def _shapes(held: Held) -> dict[str, tuple[object, ...]]:
    return {name: tensor.shape for name, tensor in held.items()}


def _may_equal(one: _Tensor, other: _Tensor, pool: Pool) -> bool:
    allowed = one.component in ("attn", "mlp", *pool.grouping.besides)
    return one.digest == other.digest or (allowed and one.can_become(other))


def _advice(one: _Tensor, other: _Tensor) -> str:
    if one.can_become(other):  # were its kind named
        return f"set grouping.besides: [norms, embeddings], {OUT}"
    return f"serve it apart, {OUT}"


def _warning(model: str, why: str, remedy: str, tensor: str | None = None) -> Problem:
    message = f"can be an adapter of no base: {why}"
    return Problem(code="no-adapters", severity="warning", model=model, tensor=tensor, message=message, remedy=remedy)
