"""What lies in a checkpoint directory, and everything about its files that would mislead a loader.

Loaders disagree where a directory is ambiguous: with both a single file and an index transformers reads the
file, vLLM and mergekit follow the index; a shard that the index forgets is random weights in one and an
error in the other. So a directory that can be read in two ways is refused, and index and headers must agree
exactly. Only names, sizes and headers are read.
"""

from pathlib import Path

from sandhi_core.checkpoints.safetensors_file import FormatError, read_header
from sandhi_core.checkpoints.survey_files import (
    ADJUSTED_INDEX,
    DOWNLOAD,
    INDEX,
    PICKLES,
    SUFFIXES,
    UNREAD,
    WEIGHTS,
    FileIdentity,
    HeaderEntry,
    Survey,
    listing,
    matches,
    read_json,
    readable_file,
)

CONFIG = "config.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
_REWRITE = "write weights and index anew with save_pretrained"


def survey(directory: Path, model: str, index: str = INDEX) -> Survey:
    """Look through a checkpoint directory without reading weights; `index` is the only name that an index may have.
    Finds all problems, raises none."""
    found = Survey(directory, model, index)
    if not directory.is_dir():
        message = f"{directory} is no directory" if directory.exists() else f"there is no directory {directory}"
        found.report("directory-missing", message, "correct the path in the pool file")
        return found
    files = listing(found)
    found.ignored = tuple(f for f in files if matches(f, UNREAD))
    found.beside = tuple(f for f in files if not matches(f, WEIGHTS))
    readable = {f for f in files if f not in found.ignored and readable_file(found, f)}
    _read_config(found, files, readable)
    shards = _weight_files(found, files, readable)
    _read_headers(found, shards)
    all_read = bool(found.weights) and found.weights.keys() == {*shards, *found.shard_of.values()}
    if all_read and not found.headers:
        found.report("weights-missing", "holds no tensor at all", DOWNLOAD, shards[0])
    found.complete = all_read and bool(found.headers)
    if found.index is not None:
        _compare_with_index(found)
    return found


def _read_config(found: Survey, files: list[str], readable: set[str]) -> None:
    if ADAPTER in files and CONFIG in files and (SINGLE in files or INDEX in files):
        found.report(
            "adapter-beside",
            "some loaders would apply this adapter to the weights beside it, others would not",
            "move the adapter's files elsewhere",
            ADAPTER,
        )
    elif ADAPTER in files:
        found.report(
            "adapter-only",
            "describes an adapter (LoRA), not a whole model",
            "merge it into its base model first (peft: merge_and_unload) and save the result",
            ADAPTER,
        )
    elif CONFIG not in files:
        found.report("config-missing", "is missing", "use a directory written by save_pretrained", CONFIG)
    if CONFIG in readable:
        try:
            found.config = read_json(found.directory / CONFIG)
        except ValueError as error:
            found.report("config-invalid", str(error), "take the file from the model's source again", CONFIG)


def _weight_files(found: Survey, files: list[str], readable: set[str]) -> list[str]:
    """The files that hold the weights, as far as they can be read."""
    present = [f for f in files if f.endswith(tuple(SUFFIXES.values())) and "/" not in f]
    index = found.index_name
    if index in files:
        found.index = index
        found.shard_of = _index(found) if index in readable else {}
        wanted = sorted(set(found.shard_of.values()))
        if SINGLE in files and SINGLE not in wanted:
            found.report(
                "weights-ambiguous",
                f"lies beside {index}: loaders disagree which of them is the model",
                "remove the one that is stale",
                SINGLE,
            )
    else:
        wanted = [SINGLE] if SINGLE in present else []
        if not wanted and ADAPTER not in files:
            _report_no_weights(found, files, present)
    for stray in sorted(set(present) - {*wanted, SINGLE}) if wanted else ():
        found.report(
            "weights-stray",
            "holds weights that do not belong to the model; some loaders read every such file",
            "move it out of the directory",
            stray,
        )
    for missing in sorted(set(wanted) - set(files)):
        found.report("shard-missing", f"is missing, but {index} names it", DOWNLOAD, missing)
    return [s for s in wanted if s in readable]


def _report_no_weights(found: Survey, files: list[str], present: list[str]) -> None:
    pickles = [f for f in found.ignored if matches(f, PICKLES)]
    if ADJUSTED_INDEX in files:
        found.report(
            "weights-missing",
            "is the index of an export that adds residuals to shared tensors, not of a checkpoint",
            "use the checkpoint that the export was made from; to run the export, sandhi_core.serving.load",
            ADJUSTED_INDEX,
        )
    elif parts := [f for f in present if f.endswith(SUFFIXES[ADJUSTED_INDEX])]:
        found.report(
            "weights-missing",
            f"is a part of a model that adds residuals to shared tensors, and its {ADJUSTED_INDEX} is gone",
            "use the checkpoint that the export was made from; to run the export, restore it",
            parts[0],
        )
    elif present:
        found.report(
            "weights-missing",
            f"has no name that loaders look for, and there is no {found.index_name}",
            f"name a single file {SINGLE}; write shards and their index with save_pretrained",
            present[0],
        )
    elif pickles:
        found.report(
            "pickle-only",
            "holds the weights as a pickle, which can run code when it is read",
            "convert it to safetensors where you trust it: load it and save_pretrained",
            pickles[0],
        )
    else:
        others = f" (there is {found.ignored[0]})" if found.ignored else ""
        remedy = "use a directory written by save_pretrained"
        found.report("weights-missing", f"is missing{others}", remedy, SINGLE)


def _index(found: Survey) -> dict[str, str]:
    """Tensor name to shard, as the index has it; reports and drops what cannot be."""
    index, suffix = found.index_name, SUFFIXES[found.index_name]
    try:
        weight_map = read_json(found.directory / index).get("weight_map")
    except ValueError as error:
        found.report("index-invalid", str(error), _REWRITE, index)
        return {}
    if not isinstance(weight_map, dict) or not weight_map:
        found.report("index-invalid", "has no weight_map", _REWRITE, index)
        return {}
    good: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if isinstance(shard, str) and shard.endswith(suffix) and Path(shard).name == shard:
            good[tensor] = shard
        else:
            message = f"names the shard {shard!r}, which is no name of a *{suffix} file beside it"
            found.report("index-invalid", message, _REWRITE, index, tensor)
    return good


def _read_headers(found: Survey, shards: list[str]) -> None:
    for file in shards:
        path = found.directory / file
        try:
            identity = FileIdentity.of(path.stat())
            places = read_header(path)
        except (FormatError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            found.report("file-damaged", f"is no intact safetensors file: {reason}", DOWNLOAD, file)
            continue
        found.weights[file] = identity
        for name, place in places.items():
            if name in found.headers:
                message = f"is in {found.headers[name].file} as well"
                found.report("tensor-duplicated", message, _REWRITE, file, name)
            entry = HeaderEntry(name, file, place.dtype, place.shape, place.end - place.start, place.start)
            found.headers[name] = entry
    found.headers = dict(sorted(found.headers.items()))


def _compare_with_index(found: Survey) -> None:
    """Every tensor is where the index says, and nowhere else. What lies in shards that could not be read is
    unknown, and their own problem."""
    for name in sorted(found.shard_of.keys() | found.headers.keys()):
        named, entry = found.shard_of.get(name), found.headers.get(name)
        if entry is None:
            if named in found.weights:
                message = f"{found.index} names it, but this shard lacks it"
                found.report("index-mismatch", message, _REWRITE, named, name)
        elif named is None:
            message = f"is in the shard, but {found.index} does not name it"
            found.report("index-mismatch", message, _REWRITE, entry.file, name)
        elif named != entry.file:
            found.report("index-mismatch", f"{found.index} says that it is in {named}", _REWRITE, entry.file, name)
