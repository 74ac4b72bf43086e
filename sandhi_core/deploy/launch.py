"""How one model of a pool is started, whatever the engine."""

from typing import NamedTuple

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""safetensors' spelling to torch's, of every dtype that the weights of a pool may have (records.DTYPE_BYTES)."""
PYTHON = "python3"
"""Of an engine's environment. No path: a specification must be the same wherever it is derived again. Unlike `python`
this name is there on every system that follows PEP 394, in virtual environments too."""


class Launch(NamedTuple):
    """How one model is started. `options`: beside its directory and address. `port` and `metrics` (the path of what
    Prometheus reads there): None where it is no server."""

    options: tuple[str, ...]
    port: int | None
    metrics: str | None
    dtype: str
    max_model_len: int | None
    notes: tuple[str, ...]
