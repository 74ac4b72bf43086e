"""The transformers library as the engine: whoever serves loads each export by `sandhi_core.serving.load`, which applies
residuals. The command of each model is a quick look at it, no server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandhi_core.deploy.launch import Launch
from sandhi_core.deploy.sizing import ModelMemory, PoolMemory

NOTES = (
    "from sandhi_core.serving.load import load; load(directory) gives the model, its shared tensors mapped from the "
    "export's files: processes on one machine's CPU hold each of them once",
    "each command answers prompts from standard input, one a line: a look at what is served, no server",
)


def launch(
    model: str,
    directory: Path,
    place: int,
    dtype: str,
    config: Mapping[str, Any],
    pool: PoolMemory,
    memory: ModelMemory,
) -> Launch:
    """Load `model` from `directory`; takes what every engine's `launch` takes."""
    length = (config.get("text_config") or config).get("max_position_embeddings")
    return Launch(("python", "-m", "sandhi_core.serving.load", str(directory)), None, dtype, length, ())


def pool_notes(pool: PoolMemory) -> tuple[str, ...]:
    return NOTES
