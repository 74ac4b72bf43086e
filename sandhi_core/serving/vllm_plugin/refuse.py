"""What the plugin cannot serve, as a function of configurations: refused before an engine starts.

Knows no vLLM and reads no files, so that whoever plans a server can ask beforehand; the plugin asks again itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from sandhi_core.assignment import factors_among
from sandhi_core.checkpoints.architecture import problems_of
from sandhi_core.checkpoints.survey_files import HeaderEntry
from sandhi_core.deploy.vllm import DTYPES, NAME, heads_beyond_cpu
from sandhi_core.disk import RESTORE
from sandhi_core.errors import PreflightError, Problem, SandhiError, UsageError
from sandhi_core.records import ExportedTensor
from sandhi_core.serving.gpu import RANK
from sandhi_core.serving.mapped import Digests
from sandhi_core.serving.slices import Slices

_ELSEWHERE = (
    "give the model `engine: transformers` in the pool file and build again, serve it with --engine transformers, or "
    "serve it on a GPU"
)
_COPIES = "shared tensors stay as the files have them: another dtype would be a copy in each process"


@dataclass(frozen=True)
class Options:
    """Those of `--model-loader-extra-config`. `digests`: how much of what is mapped is held to its digests at start.
    `owner`: socket of the process that holds a GPU's shared tensors, with `{rank}` in it where there are several."""

    digests: Digests = "sampled"
    owner: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Raises UsageError where an option or its value is unknown."""
        remedy = """give --model-loader-extra-config '{"digests": "full"}', or "owner" with the path of a socket"""
        if unknown := sorted(set(given) - {"digests", "owner"}):
            raise UsageError(f"unknown option of the loader: {unknown[0]}", remedy=remedy)
        options = cls(**given)
        if options.digests not in get_args(Digests):
            raise UsageError(f"digests is {options.digests!r}, not full, sampled or off", remedy=remedy)
        if options.owner is not None and not (isinstance(options.owner, str) and options.owner):
            raise UsageError(f"owner is {options.owner!r}, not the path of a socket", remedy=remedy)
        return options


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is configured, as far as the plugin depends on it; `extras`: what else is switched on, in words,
    of `EXTRAS`."""

    dtype: str = "bfloat16"
    device: str = "cpu"
    quantization: str | None = NAME
    load_format: str = NAME
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    extras: frozenset[str] = frozenset()
    options: Options = Options()


EXTRAS = {
    "LoRA": "adapters change layers that the plugin maps: serve the model's directory alone, without --enable-lora",
    "speculative decoding": "a draft model would be loaded as an export too: leave --speculative-config, --spec-* out",
    "weight offloading": "offloaded weights are copies: leave --cpu-offload-gb and --offload-* out",
    "sleep mode": "weights that are mapped cannot be put to sleep: leave --enable-sleep-mode out",
    "expert load balancing": "experts that move are copies: leave --enable-eplb out",
    "batch invariance": "mapped layers do not use vLLM's kernels for it: leave VLLM_BATCH_INVARIANT unset",
}
"""What an engine can do that the plugin cannot, with the remedy."""


def gaps(model: str, config: Mapping[str, Any], tensors: Mapping[str, ExportedTensor]) -> list[Problem]:
    """Tensors that a model lacks, that have other shapes than its configuration says, or that it has no place for.

    vLLM does not see all of these: of matrices that it fuses one may be missing, and the rows of it are whatever its
    memory held before. `config`: the model's config.json; `tensors`: all that the manifest has of it, by name."""
    added = factors_among(tensors)
    headers = {
        name: HeaderEntry(name, tensor.file, tensor.dtype, tensor.shape, tensor.nbytes, 0)
        for name, tensor in tensors.items()
        if name not in added
    }
    return [problem.model_copy(update={"remedy": RESTORE}) for problem in problems_of(model, dict(config), headers)]


def require_whole(model: str, config: Mapping[str, Any], tensors: Mapping[str, ExportedTensor]) -> None:
    """Raises PreflightError with all `gaps` of a model."""
    if found := gaps(model, config, tensors):
        raise PreflightError(found)


def problems(
    model: str, config: Mapping[str, Any], shared: Mapping[str, ExportedTensor], engine: EngineSettings
) -> list[Problem]:
    """Why the plugin cannot serve a model of an export with an engine so configured; empty where it can. `config`:
    the model's config.json; `shared`: the matrices that it maps, by name."""
    found = (
        *_flags(engine),
        *_device(engine),
        *_extras(engine),
        *_dtypes(shared, engine),
        *_heads(config, engine.device),
        *_ranks(model, config, engine),
    )
    if other := config.get("quantization_config"):
        method = other.get("quant_method") if isinstance(other, Mapping) else other
        remedy = "leave --quantization and --load-format out: stock vLLM serves it without sharing"
        found += ((None, f"its weights are quantized already ({method}), vLLM takes one quantization", remedy),)
    return [_problem(model, *one) for one in found]


def _problem(model: str, tensor: str | None, message: str, remedy: str) -> Problem:
    return Problem(code="vllm", severity="error", model=model, tensor=tensor, message=message, remedy=remedy)


def require_heads(model: str, config: Mapping[str, Any], device: str) -> None:
    """Raises PreflightError where no vLLM, with the plugin or without, computes a model's attention on this device."""
    if found := [_problem(model, *one) for one in _heads(config, device)]:
        raise PreflightError(found)


def require_servable(
    model: str, config: Mapping[str, Any], shared: Mapping[str, ExportedTensor], engine: EngineSettings
) -> None:
    """Raises PreflightError with all `problems` of a model."""
    if found := problems(model, config, shared, engine):
        raise PreflightError(found)


Finding = tuple[str | None, str, str]
"""Tensor, message and remedy."""


def _flags(engine: EngineSettings) -> Iterator[Finding]:
    for flag, given in (("quantization", engine.quantization), ("load-format", engine.load_format)):
        if given != NAME:
            message = f"--{flag} is {given}, but shared tensors are mapped only with --quantization and --load-format"
            yield None, f"{message} {NAME}", "give both, or neither to serve it without sharing"


def _heads(config: Mapping[str, Any], device: str) -> Iterator[Finding]:
    if device == "cpu" and (size := heads_beyond_cpu(config)):
        message = f"its heads have {size} elements, which vLLM's attention does not take on a CPU"
        yield None, message, _ELSEWHERE


def _device(engine: EngineSettings) -> Iterator[Finding]:
    owner = engine.options.owner
    if engine.device not in ("cpu", "cuda"):
        yield None, f"the plugin maps tensors on CPU and CUDA, not on {engine.device}", "serve it on one of these"
    if engine.device == "cuda" and owner is None:
        start = (
            "use `sandhi serve`, or start `python -m sandhi_core.serving.cuda.owner EXPORT --socket PATH` for each GPU"
        )
        give = """and give --model-loader-extra-config '{"owner": "PATH"}'"""
        yield None, "on a GPU shared tensors belong to a process of their own, and none is named", f"{start} {give}"
    if engine.device == "cuda" and owner is not None and engine.tensor_parallel > 1 and RANK not in owner:
        message = f"{engine.tensor_parallel} ranks need an owner each, but {owner} is one socket"
        yield None, message, f"put {RANK} into the path, where the number of the rank shall be"
    if engine.device == "cpu" and owner is not None:
        yield None, "an owner is named, but on the CPU the files themselves are mapped", "leave owner out"


def _extras(engine: EngineSettings) -> Iterator[Finding]:
    if engine.pipeline_parallel > 1:
        yield None, "pipeline parallelism is not supported", "use --tensor-parallel-size instead"
    for extra in sorted(engine.extras):
        yield None, f"{extra} is not supported", EXTRAS[extra]


def _dtypes(shared: Mapping[str, ExportedTensor], engine: EngineSettings) -> Iterator[Finding]:
    others: dict[str, list[str]] = {}
    for name, tensor in sorted(shared.items()):
        if DTYPES.get(tensor.dtype) != engine.dtype:
            others.setdefault(tensor.dtype, []).append(name)
    for dtype, names in others.items():
        remedy = f"give --dtype {DTYPES[dtype]}" if dtype in DTYPES else "serve it with transformers"
        message = f"is {dtype} like {len(names) - 1} others, the engine computes in {engine.dtype}; {_COPIES}"
        yield names[0], message, remedy


def _ranks(model: str, config: Mapping[str, Any], engine: EngineSettings) -> Iterator[Finding]:
    try:
        Slices(model, config, engine.tensor_parallel)
    except SandhiError as error:
        yield None, error.problem.message, error.problem.remedy
