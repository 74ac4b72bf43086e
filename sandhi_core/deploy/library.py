"""The transformers library as the engine: whoever serves loads each export by `sandhi_core.serving.load`, which applies
residuals. The command of each model is a quick look at it, no server.

It runs a module by `python3 -m`: that needs no script, which only an installation has (the `sandhi` of one needs a
checkout besides), and unlike `python` the name is there on every system that follows PEP 394, in virtual environments
too. No path of an interpreter: the specification must be the same wherever it is derived again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandhi_core.deploy.launch import Launch
from sandhi_core.deploy.sizing import ModelMemory, PoolMemory
from sandhi_core.errors import ProofError

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""safetensors' spelling to torch's, of every dtype that the weights of a pool may have (records.DTYPE_BYTES)."""
NOTES = (
    "from sandhi_core.serving.load import load; load(directory) gives the model, its shared tensors mapped from the "
    "export's files: processes on one machine's CPU hold each of them once",
    "each command answers prompts from standard input, one a line: a look at what is served, no server",
)


def residuals(plugin: bool) -> bool:
    """Whether residuals and row vectors are applied: always."""
    return True


def served_dtype(model: str, dtype: str) -> str:
    """torch's name of the dtype of the weights' files, whichever it is. Raises ProofError where no pool has it."""
    if dtype not in DTYPES:
        message = f"has weights in {dtype}, which no checkpoint of a pool can have"
        raise ProofError(message, model=model, remedy="build the export again")
    return DTYPES[dtype]


def launch(
    model: str,
    directory: Path,
    place: int,
    dtype: str,
    config: Mapping[str, Any],
    pool: PoolMemory,
    memory: ModelMemory,
    plugin: bool,
) -> Launch:
    """Look at `model` in `directory`; takes what every engine's `launch` takes."""
    length = (config.get("text_config") or config).get("max_position_embeddings")
    return Launch(("python3", "-m", "sandhi_core.serving.look", str(directory)), None, None, dtype, length, ())


def pool_notes(pool: PoolMemory, plugin: bool) -> tuple[str, ...]:
    return NOTES
