"""What the plugin depends on of an engine, read off the command line that would start it. Knows no vLLM."""

import json
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sandhi_core.errors import UsageError
from sandhi_core.serving.vllm_plugin.refuse import Engine, Options

EXTRA_CONFIG = "--model-loader-extra-config"


class _Flags(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"vLLM's options: {message}", remedy="see `vllm serve --help=all`")


def engine_of(options: Sequence[str], device: str) -> Engine:
    """How an engine with these options is configured; what counts is the last of each (vLLM 0.32, arg_utils.py).

    Raises UsageError where one has no value that it can have.
    """
    words = [w if not w.startswith("--") else _dashed(w) for w in options]
    given = _parser().parse_known_args(words)[0]
    extras = {
        "LoRA": given.enable_lora,
        "speculative decoding": given.speculative_config is not None,
        "weight offloading": given.cpu_offload_gb > 0,
        "sleep mode": given.enable_sleep_mode,
        "expert load balancing": given.enable_eplb,
    }
    return Engine(
        dtype=given.dtype,
        device=device,
        quantization=given.quantization,
        load_format=given.load_format,
        tensor_parallel=given.tensor_parallel_size,
        pipeline_parallel=given.pipeline_parallel_size,
        extras=frozenset(extra for extra, on in extras.items() if on),
        options=Options.of(given.model_loader_extra_config),
    )


def _parser() -> ArgumentParser:
    parser = _Flags(add_help=False, allow_abbrev=False, prog="vllm")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", "-q")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--speculative-config", "-sc")
    parser.add_argument("--cpu-offload-gb", type=float, default=0.0)
    parser.add_argument(EXTRA_CONFIG, type=_object, default={})
    for flag in ("--enable-lora", "--enable-sleep-mode", "--enable-eplb"):
        parser.add_argument(flag, action=BooleanOptionalAction, default=False)
    return parser


def _dashed(word: str) -> str:
    """vLLM takes underscores in a flag for dashes."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _object(text: str) -> Mapping[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found
