"""Models as LoRA adapters of a base that they have in common, so that one stock engine serves them all.

Models whose tensors are the same, one by one, but for residuals share a base: a checkpoint of those tensors. The rest
of such a model is an adapter by PEFT's file format (huggingface/peft, docs "PEFT checkpoint format"). Everything here
is a function of the manifest, and every weight file of it is a hard link to one of a model: it adds no bytes.

An adapter keeps each matrix's own rank, and no scale: `alpha` is the rank, for all and in the patterns. PEFT and newer
vLLM read the patterns; engines that pass over them scale by lora_alpha / r, which is 1 too, and take ranks from shapes.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sandhi_core.assignment import PEFT, factors_among, vector_names
from sandhi_core.checkpoints.survey_files import ADJUSTED_INDEX, INDEX, SUFFIXES
from sandhi_core.layout import ADAPTER, index_bytes, index_name, shards
from sandhi_core.records import Adapter, Base, ExportedModel, ExportedTensor, Manifest, Ordinary, StockPlan, digest_of

CONFIG = "adapter_config.json"
READ = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What an engine reads beside weights: models of one base have the same, or they would answer otherwise."""


@dataclass(frozen=True)
class Link:
    """A file that is another one of the export (its path from the root), by a further name."""

    to: str

    def linked(self, root: Path, path: str) -> bool:
        """Whether the file `path` of the export in `root` is that one, on the disk. Raises OSError where one cannot be
        looked at."""
        return (root / path).samefile(root / self.to)


def stock_plan(models: Mapping[str, ExportedModel], max_rank: int) -> StockPlan:
    """Which models are adapters, of which bases, and why the others are none. A base has two models at least."""
    unfit = {name: why for name, model in models.items() if (why := _unfit(model, max_rank))}
    alike: dict[str, list[str]] = defaultdict(list)
    for name in sorted(models.keys() - unfit.keys()):
        alike[digest_of([_digests(models[name]), _read(models[name])])].append(name)
    # By their first model, so that nothing but the models decides the order.
    bases = tuple(_base(key, {name: models[name] for name in held}) for key, held in alike.items() if len(held) > 1)
    of_a_base = {name for base in bases for name in base.adapters}
    firsts = [next(iter(base.adapters)) for base in bases]
    others = {name: unfit.get(name) or _different(name, models, firsts) for name in sorted(models.keys() - of_a_base)}
    return StockPlan(max_rank=max_rank, bases=bases, ordinary=others)


def stock_files(manifest: Manifest) -> dict[str, Link | bytes]:
    """Every file that the plan of a manifest adds to the export: path from its root to what it holds, in the order of
    the paths. Empty where there is no plan."""
    bases = manifest.stock.bases if manifest.stock is not None else ()
    found: dict[str, Link | bytes] = {}
    for base in bases:
        found |= _base_files(base, manifest.models)
        for name, adapter in base.adapters.items():
            if adapter.directory is not None:
                model = manifest.models[name]
                found[f"{adapter.directory}/{CONFIG}"] = adapter_config(base, model)
                source = f"{model.directory}/{ADAPTER}{SUFFIXES[ADJUSTED_INDEX]}"
                found[f"{adapter.directory}/{ADAPTER}{SUFFIXES[INDEX]}"] = Link(source)
    return dict(sorted(found.items()))


def told(plan: StockPlan) -> str:
    """How far a plan is complete, in words."""
    bases = {0: "any base", 1: "one base"}.get(len(plan.bases), f"{len(plan.bases)} bases")
    return f"{len(plan.base_of)} of {len(plan.base_of) + len(plan.ordinary)} models are adapters of {bases}"


def summary(plan: StockPlan | None) -> dict[str, Any]:
    """How far a plan is complete, and why not further; empty where the pool asks for none."""
    if plan is None:
        return {}
    return {
        "told": told(plan),
        "complete": len(plan.base_of),
        "models": len(plan.base_of) + len(plan.ordinary),
        "bases": {base.directory: list(base.adapters) for base in plan.bases},
        "ordinary": {name: why.model_dump() for name, why in plan.ordinary.items()},
    }


def all_there(export_root: Path, manifest: Manifest) -> bool:
    """Whether every file of the plan is there and linked: a glance, no proof. Raises OSError where one cannot be looked
    at."""
    return all(
        source.linked(export_root, path) if isinstance(source, Link) else (export_root / path).is_file()
        for path, source in stock_files(manifest).items()
    )


def base_model(base: Base, models: Mapping[str, ExportedModel]) -> ExportedModel:
    """A base as a model of its own: what its models have in common, by the names of a stock checkpoint."""
    first = next(iter(base.adapters))
    model = models[first]
    files = {
        f: digest for f, digest in model.files.items() if all(models[m].files.get(f) == digest for m in base.adapters)
    }
    files.pop(CONFIG, None)  # of whatever the model once was an adapter of: engines would look for that
    tensors = {
        name: tensor.model_copy(update={"file": str(PurePosixPath(tensor.file).with_suffix(SUFFIXES[INDEX]))})
        for name, tensor in _common(model).items()
    }
    return model.model_copy(update={"directory": base.directory, "files": files, "tensors": tensors})


def adapter_config(base: Base, model: ExportedModel) -> bytes:
    """`adapter_config.json` of a model with residuals, keys sorted, indented by 2."""
    ranks = _ranks(model)
    largest = max(ranks.values())
    config = {
        "alpha_pattern": ranks,
        "base_model_name_or_path": base.directory,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": largest,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": largest,
        "rank_pattern": ranks,
        "target_modules": list(ranks),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def adapted_modules(base: Base, models: Mapping[str, ExportedModel]) -> list[str]:
    """The last part of the names of all linear layers that adapters of a base adapt, sorted."""
    return sorted({module.rpartition(".")[2] for name in base.adapters for module in _ranks(models[name])})


def _unfit(model: ExportedModel, max_rank: int) -> Ordinary | None:
    """Why what a model adds is nothing that an adapter can hold."""
    ranks = {f"{module}.weight": rank for module, rank in _ranks(model).items()}
    if scaled := [name for name in sorted(model.tensors) if any(v in model.tensors for v in vector_names(name))]:
        return _because("scales rows, which no adapter holds", model, scaled)
    if nameless := [tensor for tensor in ranks if not tensor.startswith("model.")]:
        return _because("adds to layers that PEFT would look for by other names", model, nameless)
    if larger := [tensor for tensor, rank in ranks.items() if rank > max_rank]:
        return _because(f"has residuals of a larger rank than {max_rank}", model, larger)
    return None


def _because(reason: str, model: ExportedModel, tensors: list[str]) -> Ordinary:
    """`tensors` are those of which what is added makes the model none."""
    nbytes = sum(model.tensors[part].nbytes for part, name in factors_among(model.tensors).items() if name in tensors)
    return Ordinary(reason=reason, first=tensors[0], count=len(tensors), nbytes=nbytes)


def _base(key: str, models: Mapping[str, ExportedModel]) -> Base:
    return Base(
        directory=f"base.{key[:16]}",  # a point, as no model's name has one
        adapters={
            name: Adapter(
                directory=f"{name}.adapter" if ranks else None,
                rank=max(ranks.values(), default=0),
                nbytes=sum(model.tensors[factor].nbytes for factor in factors_among(model.tensors)),
            )
            for name, model in models.items()
            for ranks in (_ranks(model),)
        },
    )


def _different(name: str, models: Mapping[str, ExportedModel], firsts: list[str]) -> Ordinary:
    """How a model differs from the nearest base, given by its first model, or where none is like it from the nearest
    model."""
    model, shapes = models[name], _shapes(models[name])
    like = [other for other in sorted(models) if other != name and _shapes(models[other]) == shapes]
    near = {other: _differing(model, models[other]) for other in [f for f in firsts if f in like] or like}
    if not near:
        return Ordinary(reason="is alone with tensors of these names and shapes")
    nearest = min(near, key=lambda c: (sum(t.nbytes for t in near[c].values()), c))
    if tensors := near[nearest]:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        reason = f"holds other tensors than {nearest}"
        return Ordinary(reason=reason, first=next(iter(tensors)), count=len(tensors), nbytes=nbytes)
    own, other = _read(model), _read(models[nearest])
    files = sorted(f for f in own.keys() | other.keys() if own.get(f) != other.get(f))
    if not files:
        return Ordinary(reason=f"has a base in common with {nearest} alone, whose residuals are no adapter")
    return Ordinary(reason=f"has other files than {nearest}", first=files[0], count=len(files))


def _differing(model: ExportedModel, other: ExportedModel) -> dict[str, ExportedTensor]:
    theirs = _digests(other)
    return {name: tensor for name, tensor in _common(model).items() if tensor.digest != theirs[name]}


def _common(model: ExportedModel) -> dict[str, ExportedTensor]:
    """All but residuals, sorted by name."""
    factors = factors_among(model.tensors)
    return {name: tensor for name, tensor in sorted(model.tensors.items()) if name not in factors}


def _digests(model: ExportedModel) -> dict[str, str]:
    return {name: tensor.digest for name, tensor in _common(model).items()}


def _shapes(model: ExportedModel) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in _common(model).items()}


def _read(model: ExportedModel) -> dict[str, str]:
    return {file: digest for file, digest in model.files.items() if file in READ}


def _ranks(model: ExportedModel) -> dict[str, int]:
    """Rank of every residual by the name of its linear layer, sorted."""
    return {
        factor.removeprefix(PEFT).removesuffix(".lora_A.weight"): model.tensors[factor].shape[0]
        for factor in sorted(factors_among(model.tensors))
        if factor.endswith(".lora_A.weight")
    }


def _base_files(base: Base, models: Mapping[str, ExportedModel]) -> Iterator[tuple[str, Link | bytes]]:
    model, first = base_model(base, models), models[next(iter(base.adapters))]
    yield f"{base.directory}/{INDEX}", index_bytes(model)
    for file in model.files:
        yield f"{base.directory}/{file}", Link(f"{first.directory}/{file}")
    suffix = SUFFIXES[index_name(first)]
    for file in shards(model):
        source = str(PurePosixPath(file).with_suffix(suffix))
        yield f"{base.directory}/{file}", Link(f"{first.directory}/{source}")
