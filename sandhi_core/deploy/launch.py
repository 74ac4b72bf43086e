"""How one model of a pool is started, whatever the engine."""

from typing import NamedTuple


class Launch(NamedTuple):
    """How one model is started. `port` and `metrics` (the path of what Prometheus reads there): None where it is no
    server."""

    command: tuple[str, ...]
    port: int | None
    metrics: str | None
    dtype: str
    max_model_len: int | None
    notes: tuple[str, ...]
