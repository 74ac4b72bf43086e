"""The arguments of `sandhi verify`, wherever the command runs. Nothing heavy is imported."""

import argparse
from pathlib import Path

from sandhi_core.errors import UsageError

ANSWERS = 50
"""Prompts a model that --answers compares, unless it says how many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but --json."""
    parser.add_argument("exports", type=Path, nargs="+", metavar="export", help="directory that holds sandhi.json")
    parser.add_argument(
        "--engine",
        choices=("transformers", "vllm"),
        help="also start a server for each model, ask it, and measure what the servers share",
    )
    parser.add_argument("--python", default="", help="of vLLM (default: SANDHI_VLLM_PYTHON, or this one)")
    parser.add_argument(
        "--originals",
        action="append",
        default=[],
        metavar="MODEL=DIRECTORY",
        help="the checkpoint a model was made from, measured too; may be repeated (default: as the records say)",
    )
    parser.add_argument("--pool", type=Path, help="pool file (YAML): originals, and questions to ask")
    parser.add_argument(
        "--answers",
        type=int,
        nargs="?",
        const=ANSWERS,
        default=0,
        metavar="PROMPTS",
        help=f"also hold answers to those of the scored weights ({ANSWERS} prompts a model unless it says how many)",
    )


def originals_given(words: list[str]) -> dict[str, Path]:
    """Of `--originals`. Raises UsageError for what is no MODEL=DIRECTORY, or says a model twice."""
    found: dict[str, Path] = {}
    for word in words:
        model, equals, directory = word.partition("=")
        if not (model and equals and directory):
            raise UsageError(f"--originals {word!r} is no MODEL=DIRECTORY", remedy="write --originals NAME=/path/of/it")
        if model in found:
            raise UsageError(f"--originals gives {model} twice", remedy="give each model once")
        found[model] = Path(directory).expanduser().resolve()
    return found
