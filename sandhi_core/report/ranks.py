"""Where a model's residuals lie: a table a model, layer by projection, of the ranks that it adds to shared matrices."""

from collections.abc import Mapping, Sequence

from sandhi_core.report.data import SlotState
from sandhi_core.report.page import Cell, Table


def ranks_tables(states: Mapping[str, Sequence[SlotState]]) -> tuple[Table, ...]:
    """One of each model that adds anything, in the order of the models. Norms and embeddings take no residuals and are
    left out."""
    return tuple(_table(model, slots) for model, slots in states.items() if any(s.added for s in slots))


def _table(model: str, slots: Sequence[SlotState]) -> Table:
    places = {(s.slot.layer, s.slot.projection): s for s in slots if s.slot.component in ("attn", "mlp")}
    projections = tuple(dict.fromkeys(projection for _, projection in places))
    rows = tuple(
        (Cell(str(layer)), *(Cell(_sign(places.get((layer, projection)))) for projection in projections))
        for layer in sorted({layer for layer, _ in places})
    )
    ranks = [s.adjustment.rank for s in slots if s.adjustment is not None]
    return Table(
        f"{model}: {len(ranks)} of {len(places)} matrices corrected, ranks {min(ranks)} to {max(ranks)}",
        ("layer", *projections),
        rows,
    )


def _sign(state: SlotState | None) -> str:
    if state is None:
        return ""
    if state.adjustment is not None:
        return f"{state.adjustment.rank}{' s' if state.adjustment.scale else ''}"
    return {"shared": "0", "duplicate": "="}.get(state.state, "-")
