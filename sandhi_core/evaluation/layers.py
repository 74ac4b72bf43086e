"""A model's decoder run from any layer on, through its own code, and the hidden states kept for that.

Stock transformers computes everything: layers below the start hand on what was kept instead of computing, so masks,
rotary embeddings, norms and scaling stay each architecture's own.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sandhi_core.evaluation.packing import Pack

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(\w+)")
ATTENTION = "self_attn"


@dataclass
class States:
    """Hidden states of all packs under some weights. `weights`: changed tensors to what names their bytes. `entering`:
    by layer, what goes into it, and `attended`: what its attention gives, by the pack's place, [1, T, width]."""

    weights: Mapping[str, str] = field(default_factory=dict)
    entering: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    attended: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def start(self, weights: Mapping[str, str]) -> tuple[int, bool]:
        """The deepest layer from which `weights` can be computed, and whether its attention is known too."""
        lowest, whole = _lowest(self.weights, weights)
        start = max((n for n in self.entering if n <= lowest), default=0)
        return start, start == lowest and not whole and start in self.attended

    def learn(self, other: "States") -> None:
        """Take over what other weights have in common with these: all below the lowest layer that differs."""
        lowest, whole = _lowest(self.weights, other.weights)
        for layer, states in other.entering.items():
            if layer <= lowest:
                self.entering.setdefault(layer, states)
        for layer, states in other.attended.items():
            if layer < lowest or (layer == lowest and not whole):
                self.attended.setdefault(layer, states)


def _lowest(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[float, bool]:
    """The lowest layer in which weights differ, and whether more than its MLP does; a name of no layer is below all."""
    names = {name for name, _ in one.items() ^ other.items()}
    found = [(int(m[1]), m[2] != "mlp") if (m := _LAYER.search(name)) else (-1, True) for name in names]
    lowest = min((layer for layer, _ in found), default=float("inf"))
    return lowest, any(whole for layer, whole in found if layer == lowest)


class LayerCache:
    """The states of the weights that are kept, and of the last trial.

    A trial was accepted when the next weights hold all that it held: then its states are kept. Otherwise those above
    the change are dropped, and what was kept before still is. States live on `device`.
    """

    def __init__(self, layers: Sequence[int], device: str = "cpu") -> None:
        self.layers = frozenset(layers)
        self.device = device
        self.kept = States()
        self.trial: States | None = None

    def settle(self, weights: Mapping[str, str]) -> None:
        """Decide about the last trial, now that `weights` come next."""
        if self.trial is None:
            return
        if self.trial.weights.items() <= weights.items():
            self.kept = self.trial
        else:
            self.kept.learn(self.trial)
        self.trial = None

    def begun(self, weights: Mapping[str, str], start: int) -> States:
        """The states of a run from `start` on, so far those that are kept below it."""
        return States(
            dict(weights),
            {n: s for n, s in self.kept.entering.items() if n <= start},
            {n: s for n, s in self.kept.attended.items() if n < start},
        )


@dataclass
class _Run:
    """One pass of one pack. What `entering` or `attended` hold is handed on instead of computed."""

    start: int = 0
    entering: Tensor | None = None
    attended: Tensor | None = None
    keep: frozenset[int] = frozenset()
    kept_entering: dict[int, Tensor] = field(default_factory=dict)
    kept_attended: dict[int, Tensor] = field(default_factory=dict)


class LayeredModel:
    """A causal language model of transformers whose decoder layers can be skipped.

    Raises ValueError where the model has no such layers, or layers that this cannot stand in for.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if layers is None or not all(hasattr(layer, ATTENTION) for layer in layers):
            raise ValueError("its decoder is no stack of layers with self-attention")
        self.count = len(layers)
        self._kinds = self._mask_kinds()
        self.border = _border(model.config.get_text_config())
        self._run: _Run | None = None
        for index, layer in enumerate(layers):
            layer.forward = self._layer(index, layer.forward)
            attention = getattr(layer, ATTENTION)
            attention.forward = self._attention(index, attention.forward)

    def _mask_kinds(self) -> dict[str, int | None]:
        """Kinds of attention mask the model asks for, with the window of each. One kind: its mask is given as it is."""
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds:
            return {"": window}
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(f"it has {', '.join(sorted(unknown))} layers")
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}

    def _layer(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: Tensor, *arguments: Any, **named: Any) -> Any:
            now = self._run
            if now is None:
                return forward(hidden, *arguments, **named)
            if index < now.start:
                return now.entering if index == now.start - 1 else hidden
            if index in now.keep:
                now.kept_entering[index] = hidden
            return forward(hidden, *arguments, **named)

        return run

    def _attention(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            now = self._run
            if now is None:
                return forward(*arguments, **named)
            if index == now.start and now.attended is not None:
                return now.attended, None
            attended, weights = forward(*arguments, **named)
            if index in now.keep:
                now.kept_attended[index] = attended
            return attended, weights

        return run

    def logits(self, pack: Pack, run: _Run) -> Tensor:
        """[R, vocabulary] at the pack's scored rows."""
        device, dtype = self.model.device, self.model.dtype
        masks = {kind: _additive(pack, window, device, dtype) for kind, window in self._kinds.items()}
        mask = masks.get("", masks)
        self._run = run
        try:
            out = self.model(
                input_ids=pack.tokens[None].to(device),
                position_ids=pack.positions[None].to(device),
                attention_mask=mask,
                use_cache=False,
                logits_to_keep=pack.rows.to(device),
            )
        finally:
            self._run = None
        logits: Tensor = out.logits[0]
        return logits

    def starts_anywhere(self, packs: Sequence[Pack], slack: float) -> bool:
        """Whether passes that begin in the middle or at the end give what whole ones do. They do not where a layer
        takes more from those below it than hidden states: their keys and values, for example."""
        cache = LayerCache(range(self.count), str(self.model.device))
        whole = [logits for _, logits in self.swept(packs, cache, {})]
        changes = [
            f"layers.{layer}.{part}" for layer in (self.count // 2, self.count - 1) for part in (ATTENTION, "mlp")
        ]
        return all(
            torch.allclose(logits, whole[at], rtol=slack, atol=slack, equal_nan=True)
            for change in changes
            for at, logits in self.swept(packs, cache, {change: "as before"})
        )

    def swept(
        self, packs: Sequence[Pack], cache: LayerCache, weights: Mapping[str, str], order: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Every pack's place and its logits under `weights`, which the model holds now; layers that are known are
        skipped. `order`: in which the packs are computed; it changes no number."""
        cache.settle(weights)
        start, attended = cache.kept.start(weights)
        kept, states = cache.kept, cache.begun(weights, start)
        keep = frozenset(n for n in cache.layers if n >= start)
        for at in range(len(packs)) if order is None else order:
            run = _Run(
                start,
                kept.entering[start][at].to(self.model.device) if start else None,
                kept.attended[start][at].to(self.model.device) if attended else None,
                keep,
            )
            yield at, self.logits(packs[at], run)
            if attended:
                run.kept_attended[start] = kept.attended[start][at]
            for layer in keep - {start, 0}:
                states.entering.setdefault(layer, {})[at] = run.kept_entering[layer].to(cache.device)
            for layer in keep:
                states.attended.setdefault(layer, {})[at] = run.kept_attended[layer].to(cache.device)
        cache.trial = states  # complete: a pass that was cut short is never built on


def _border(config: Any) -> float:
    """Tokens of a sequence beyond which its rotary embedding is another one for all of it (longrope)."""
    stated = getattr(config, "rope_parameters", None) or {}
    kinds = [stated, *(inner for inner in stated.values() if isinstance(inner, dict))]  # by kind of layer
    borders = (kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope")
    return min(borders, default=math.inf)


def _additive(pack: Pack, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, 1, T, T]: nought where a token is seen, the lowest number elsewhere."""
    seen = torch.from_numpy(pack.visible(window)).to(device)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
