"""The engines that models are measured on: which there are, where they lie, what their processes are given."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from sandhi_core.errors import UsageError
from sandhi_core.pools.pool import Engine
from sandhi_core.serving.processes import QUIET

PYTHON = "SANDHI_VLLM_PYTHON"
"""The environment variable that names the Python of a vLLM with this package. It is no setting of a pool: where an
engine lies is a matter of the machine, and moving it must not make a pool's records stale."""
_CONTEXT = 256  # tokens of a sequence at most, prompt and answer: enough to see that the weights are right
_PACKAGE = Path(__file__).resolve().parents[2]  # where this package lies


def python_of(engine: Engine, given: str = "") -> str:
    """The interpreter of an engine: the one that is given, or for vLLM that of the environment variable, or this one.

    Raises UsageError where there is none.
    """
    python = given or (os.environ.get(PYTHON, "") if engine == "vllm" else "")
    if python:
        found = shutil.which(Path(python).expanduser())
        if found is None:
            raise UsageError(f"{python!r} is no program", remedy="give the path of a Python interpreter")
        return str(Path(found).absolute())  # not resolved: a virtual environment is found by the link
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "there is no vLLM beside this Python",
            remedy=f"name the Python that has it, and this package, by --python or {PYTHON}",
        )
    return sys.executable


def environment() -> dict[str, str]:
    """What an engine's processes are given beside this process's environment.

    A checkout comes first on their path, so that it is its code that runs. An installed package must not: all that
    this Python has installed would come along, before what the engine's has.
    """
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **QUIET}
    if not (_PACKAGE / "pyproject.toml").is_file():
        return given
    paths = filter(None, (str(_PACKAGE), os.environ.get("PYTHONPATH", "")))
    return given | {"PYTHONPATH": os.pathsep.join(paths)}


def context_of(directory: Path) -> int:
    """Tokens of a sequence at most, as models are served here."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    made_for = (config.get("text_config") or config).get("max_position_embeddings")
    return min(_CONTEXT, made_for or _CONTEXT)
