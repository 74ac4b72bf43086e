"""How one model of a pool is started, whatever the engine."""

from typing import NamedTuple


class Launch(NamedTuple):
    """How one model is started. `port`: None where it is no server."""

    command: tuple[str, ...]
    port: int | None
    dtype: str
    max_model_len: int | None
    notes: tuple[str, ...]
