"""What the plugin depends on of an engine, read off the command line that would start it. Knows no vLLM."""

import json
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from sandhi_core.errors import UsageError
from sandhi_core.serving.vllm_plugin.refuse import EngineSettings, Options

EXTRA_CONFIG = "--model-loader-extra-config"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
NONE: Mapping[str, str] = MappingProxyType({})
_SPECULATIVE = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


class _Flags(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"vLLM's options: {message}", remedy="see `vllm serve --help=all`")


def settings_from_flags(options: Sequence[str], device: str, environment: Mapping[str, str] = NONE) -> EngineSettings:
    """How an engine with these options and environment variables is configured; what counts is the last of each option
    (vLLM 0.32, engine/arg_utils.py and envs.py).

    Raises UsageError where one has no value that it can have.
    """
    words = [w if not w.startswith("--") else _dashed(w) for w in options]
    given = _parser().parse_known_args(words)[0]
    extras = {
        "LoRA": given.enable_lora,
        "speculative decoding": any(getattr(given, flag) is not None for flag in _SPECULATIVE),
        "weight offloading": given.cpu_offload_gb > 0 or given.offload_group_size > 0,
        "sleep mode": given.enable_sleep_mode,
        "expert load balancing": given.enable_eplb,
        "batch invariance": environment.get(BATCH_INVARIANT, "0") != "0",
    }
    return EngineSettings(
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
    for name in _SPECULATIVE[1:]:
        parser.add_argument(_dashed(f"--{name}"))
    parser.add_argument("--cpu-offload-gb", type=float, default=0.0)
    parser.add_argument("--offload-group-size", type=int, default=0)
    parser.add_argument(EXTRA_CONFIG, type=_object, default={})
    for flag in ("--enable-lora", "--enable-sleep-mode", "--enable-eplb"):
        parser.add_argument(flag, action=BooleanOptionalAction, default=False)
    return parser


def _dashed(word: str) -> str:
    """vLLM takes underscores in a flag for dashes."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"{text!r} is no JSON object")
    return found
