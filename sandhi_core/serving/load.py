"""Any exported model, ready to run: its tensors are the mapped files, and what it adds to shared ones is applied.

What an export shares is mapped read-only (`mapped`): one copy for all processes, and in one process for all names of
the same bytes. What a model alone holds is mapped privately, so that it can be changed; it is read ahead (`prefetch`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from sandhi_core.assignment import factor_names, factors_among, is_factor, vector_names
from sandhi_core.checkpoints.checkpoint import Checkpoint, refuse
from sandhi_core.checkpoints.survey_files import ADJUSTED_INDEX, INDEX, SUFFIXES
from sandhi_core.disk import RESTORE
from sandhi_core.errors import CheckpointError
from sandhi_core.layout import ADAPTER, MANIFEST
from sandhi_core.rungs.residual import Residual, attach
from sandhi_core.serving.mapped import Digests, MappedModel, mapped_model, residual_among
from sandhi_core.serving.prefetch import prefetching, private_spans

_CHECK = "it must be a whole causal language model that transformers knows: restore what is missing or damaged"


def load(
    directory: "Path | str",
    dtype: "torch.dtype | str" = "auto",
    device: "torch.device | str" = "cpu",
    name: str | None = None,
    digests: Digests = "sampled",
    writable: bool = False,
) -> PreTrainedModel:
    """The model in an exported directory, in evaluation mode; `auto` is the dtype of the files, in which nothing is
    copied on the CPU. `name` is the model's in errors, by default the directory's. `digests`: how much of it is held to
    the manifest first. Writing into what it shares ends the process (SIGSEGV), unless it is `writable`: then pages
    that are written are copied. A checkpoint that is no part of an export has no manifest, and always is.

    Raises CheckpointError where tensors are missing or of other shapes, residuals would be left out, or transformers
    cannot load the model; of one with residuals also where a tensor is unexpected. ProofError where files of an export
    are not what its manifest says. And what torch raises of a device.
    """
    directory = Path(directory).absolute()
    name = name or directory.name
    if (directory / MANIFEST).is_file():
        raise _wrong(directory, name, "is a whole export", remedy="give the directory of one model in it")
    if not directory.is_dir():
        raise _wrong(directory, name, "is no directory", remedy="give the directory of one model of an export")
    index = index_of(directory)
    if mapped := mapped_model(directory):
        with prefetching(name, private_spans(mapped)):
            mapped.check(digests)
            return _built(directory, name, _exported(mapped, writable), dtype, device)
    if index == ADJUSTED_INDEX:
        return _built(directory, name, _whole(directory, name), dtype, device)
    options = {"dtype": dtype, "local_files_only": True}
    model, report = _loading(directory, name, lambda: _stock(AutoModelForCausalLM, directory, **options))
    _require_all(directory, name, report)
    for factor in sorted(filter(is_factor, report["unexpected_keys"])):
        message = f"is a factor of a residual, which is applied only where {ADJUSTED_INDEX} names it"
        raise _wrong(directory, name, message, factor)
    return model.to(device).eval()


def index_of(directory: Path) -> str:
    """The name of the index that a model's directory has, or would have. Raises CheckpointError where it has both, or
    shards of a model with residuals and no index of one, or is an adapter."""
    if not (directory / ADJUSTED_INDEX).exists():
        for shard in sorted(directory.glob(f"*{SUFFIXES[ADJUSTED_INDEX]}")):
            message = f"is missing, but {shard.name} is a part of a model with residuals"
            raise _wrong(directory, directory.name, message, file=ADJUSTED_INDEX)
        adapter = ADAPTER + SUFFIXES[INDEX]
        if (directory / adapter).exists():
            message = "holds residuals of a model, which is not this directory: give the model's own, without .adapter"
            raise _wrong(directory, directory.name, message, file=adapter)
        return INDEX
    if (directory / INDEX).exists():
        raise _wrong(directory, directory.name, f"lies beside {ADJUSTED_INDEX}, and leaves out residuals", file=INDEX)
    return ADJUSTED_INDEX


def module_of(model: Module, tensor: str) -> Module | None:
    """The module that has the parameter of a tensor name in the files, which may lack transformers' prefix."""
    owner, _, parameter = tensor.rpartition(".")
    for name in (owner, f"model.{owner}"):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(getattr(module, parameter, None), Parameter):
            return module
    return None


# --- tensors ------------------------------------------------------------------------------------------------


def _exported(mapped: MappedModel, writable: bool) -> dict[str, Tensor]:
    shared = frozenset[str]() if writable else mapped.shared()
    return {name: mapped.tensor(name) if name in shared else mapped.own(name) for name in mapped.tensors}


def _whole(directory: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of a model with residuals that lies alone, once index and headers agree."""
    try:
        files = Checkpoint.open(directory, name, ADJUSTED_INDEX).weights
    except CheckpointError as error:
        raise refuse(error.problem.model_copy(update={"remedy": RESTORE})) from None
    return {tensor: held for file in files for tensor, held in _private(directory / file).items()}


def _private(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, over a private mapping: pages that are written are copied."""
    with safe_open(path, framework="pt") as shard:
        return {tensor: shard.get_tensor(tensor) for tensor in sorted(shard.keys())}


# --- models -------------------------------------------------------------------------------------------------


def _built(
    directory: Path, name: str, tensors: dict[str, Tensor], dtype: "torch.dtype | str", device: "torch.device | str"
) -> PreTrainedModel:
    """The model over all its tensors, and what it adds to some of them."""
    weights = sorted(set(factors_among(tensors).values()))
    added = {weight: _added(directory, name, tensors, weight) for weight in weights}
    model, report = _loading(directory, name, lambda: _given(directory, tensors, dtype))
    _require_all(directory, name, report)
    for extra in sorted(name for name in report["unexpected_keys"] if added or is_factor(name)):
        raise _wrong(directory, name, "the model has no such tensor, and none that this could be added to", extra)
    model.to(device).eval()
    for weight, residual in added.items():
        _attach(directory, name, model, weight, residual)
    if added:  # transformers would save the shared matrices and leave the residuals out
        model.save_pretrained = partial(_unsaved, directory, name)
    return model


def _unsaved(directory: Path, name: str, *arguments: Any, **options: Any) -> NoReturn:
    message = "a model with residuals cannot be saved as a checkpoint: these would be left out"
    raise _wrong(directory, name, message, remedy="copy its directory of the export instead")


def _added(directory: Path, name: str, tensors: dict[str, Tensor], weight: str) -> Residual:
    """Takes what goes with a weight out of `tensors`: its two factors, its two vectors, or both."""
    found = residual_among(tensors, weight, name, directory)
    return Residual(**{part: tensors.pop(tensor) for part, tensor in found.items()})


def _given(directory: Path, tensors: dict[str, Tensor], dtype: "torch.dtype | str") -> tuple[PreTrainedModel, Any]:
    """The model of a directory's configuration over these tensors."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    try:
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:  # it has none: transformers makes one of the configuration
        generation = None
    model, report = _stock(
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)],
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        generation_config=generation,
    )
    model.name_or_path = model.config.name_or_path = str(directory)
    return model, report


def _attach(directory: Path, name: str, model: PreTrainedModel, weight: str, residual: Residual) -> None:
    linear = module_of(model, weight)
    if not isinstance(linear, Linear):
        raise _wrong(directory, name, "has residuals, but is no linear layer of the model", weight)
    rows, columns = linear.weight.shape
    parts = (residual.down, residual.up, residual.scale, residual.shift)
    shapes = ((residual.rank, columns), (rows, residual.rank), (rows,), (rows,))
    for part, tensor, shape in zip((*factor_names(weight), *vector_names(weight)), parts, shapes, strict=True):
        if tensor is not None and tensor.shape != shape:
            raise _wrong(directory, name, f"has shape {list(tensor.shape)}, {list(shape)} belongs there", part)
        if tensor is not None and len(shape) == 1 and not tensor.isfinite().all():
            raise _wrong(directory, name, "holds numbers that are not finite", part)
    attach(linear, residual)


# --- transformers -------------------------------------------------------------------------------------------


def _stock(kind: Any, source: Path | None, **options: Any) -> tuple[PreTrainedModel, Any]:
    # Said outright that a model's own code is not run: else transformers asks at the terminal.
    model, report = kind.from_pretrained(source, output_loading_info=True, trust_remote_code=False, **options)
    return model, report


def _loading(
    directory: Path, name: str, loads: Callable[[], tuple[PreTrainedModel, Any]]
) -> tuple[PreTrainedModel, Any]:
    try:
        return loads()
    except Exception as error:  # whatever a model type's code may raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        raise _wrong(directory, name, f"transformers cannot load the model: {reason}", remedy=_CHECK) from error


def _require_all(directory: Path, name: str, report: Mapping[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):
        message = f"transformers would fill {len(missing)} tensors that the files lack with random numbers"
        raise _wrong(directory, name, message, missing[0], remedy=_CHECK)


def _wrong(
    directory: Path, name: str, message: str, tensor: str | None = None, *, remedy: str = RESTORE, file: str = ""
) -> CheckpointError:
    return CheckpointError(message, model=name, file=str(directory / file), tensor=tensor, remedy=remedy)
