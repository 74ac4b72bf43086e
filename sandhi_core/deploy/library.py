"""The transformers library as the engine: whoever serves loads each export by `sandhi_core.serving.load`, which applies
residuals. The command of each model is a quick look at it, no server.

It runs a module by `python3 -m`: that needs no script, which only an installation has (the `sandhi` of one needs a
checkout besides).
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from sandhi_core.deploy.launch import DTYPES, PYTHON, Launch
from sandhi_core.deploy.sizing import ModelMemory, PoolMemory
from sandhi_core.errors import ProofError

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
    place: int,
    dtype: str,
    config: Mapping[str, Any],
    pool: PoolMemory,
    memory: ModelMemory,
    plugin: bool,
) -> Launch:
    """Look at `model`; takes what every engine's `launch` takes."""
    length = (config.get("text_config") or config).get("max_position_embeddings")
    return Launch((), None, None, dtype, length, ())


def command(export: PurePath, directory: str, options: Sequence[str], port: int | None) -> tuple[str, ...]:
    """A look at the model in `directory` of the export; takes what every engine's `command` takes."""
    return (PYTHON, "-m", "sandhi_core.serving.look", str(export / directory))


def pool_notes(pool: PoolMemory, plugin: bool) -> tuple[str, ...]:
    return NOTES
