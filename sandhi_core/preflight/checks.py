"""Everything that must hold before an hour of a GPU is spent on a pool; all problems at once.

`check_model` looks at one checkpoint, `check_pool` at what only the whole pool shows.
"""

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from sandhi_core.checkpoints.architecture import problems_of
from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.checkpoints.outline import outline
from sandhi_core.checkpoints.scan import examine
from sandhi_core.checkpoints.survey import CONFIG, survey
from sandhi_core.checkpoints.survey_files import Survey
from sandhi_core.checkpoints.vocabulary import TOKENIZER, TOKENIZERS, token_ids
from sandhi_core.errors import Problem, SandhiError
from sandhi_core.pools.pool import Base, ModelEntry
from sandhi_core.preflight.loading import check_model_class, check_tokenizer_class
from sandhi_core.preflight.pool import check_pool
from sandhi_core.records import DTYPE_BYTES, Fingerprint
from sandhi_core.words import count

__all__ = ["check_base", "check_model", "check_pool"]

# bitsandbytes, GPTQ and AWQ, FP8, compressed-tensors; MXFP4, HQQ, quanto, EXL2, QuIP#, AQLM
_QUANTISED = re.compile(
    r"(.*\.)?(SCB|qweight|qzeros|g_idx|scales|zeros|(nested_)?absmax|(nested_)?quant_map|weight_format"
    r"|quant_state\..+|weight_scale(_inv|_2)?|input_scale|weight_packed|weight_shape|weight_zero_point"
    r"|\w+_(blocks|scales)|W_q|weight\._(data|scale|shift)|q_(weight|perm|groups|scale|scale_max)|Qidxs|codebooks|codes)"
)
_HOPELESS = ("quantised", "model-type-unsupported", "config-invalid")  # whatever the weights may hold
_UNQUANTISED = "use the unquantised checkpoint that this one was made from"


def _untold(nbytes: int) -> None:
    pass


def check_model(
    entry: ModelEntry, scans: Path | None, deep: bool = True, told: Callable[[int], None] = _untold
) -> tuple[list[Problem], Fingerprint | None]:
    """Every problem of one model, and its fingerprint where none is an error.

    Reads names, headers and JSON; `deep` reads every weight as well (what it finds is kept in `scans`, if given,
    so that they are read once only) and tells after each tensor how many bytes that were. Without it the fingerprint
    is an `outline`. Raises nothing for a bad checkpoint.
    """
    try:
        directory = resolve(entry)
    except SandhiError as error:
        return [error.problem], None
    found = survey(directory, entry.name)
    if not directory.is_dir():
        return found.problems, None
    fingerprint = _check_weights(found, scans, deep, told)
    _check_tokenizer(found)
    _check_loading(found)
    _mention_ignored(found)
    _mention_links(found)
    return _judged(found, fingerprint)


def check_base(
    base: Base, scans: Path | None, deep: bool = True, told: Callable[[int], None] = _untold
) -> tuple[list[Problem], Fingerprint | None]:
    """As `check_model`, of a checkpoint that nobody is to run: it needs no tokenizer, and no model is made of it."""
    try:
        found = survey(resolve(base), base.name)
    except SandhiError as error:
        return [error.problem], None
    return _judged(found, _check_weights(found, scans, deep, told) if found.directory.is_dir() else None)


def _check_weights(found: Survey, scans: Path | None, deep: bool, told: Callable[[int], None]) -> Fingerprint | None:
    readable = not found.problems
    _check_quantised(found)
    if not any(p.code == "quantised" for p in found.problems) and found.complete and found.config:
        found.problems += problems_of(found.model, found.config, found.headers)
    if not readable or any(p.code in _HOPELESS for p in found.problems):
        return None
    fingerprint, more = _read(found, scans, deep, told)
    found.problems += more
    return fingerprint


def _judged(found: Survey, fingerprint: Fingerprint | None) -> tuple[list[Problem], Fingerprint | None]:
    problems = list(dict.fromkeys(map(found.located, found.problems)))
    sound = all(p.severity != "error" for p in problems)
    return problems, fingerprint if sound else None


def _read(
    found: Survey, scans: Path | None, deep: bool, told: Callable[[int], None]
) -> tuple[Fingerprint | None, list[Problem]]:
    try:
        if not deep:
            return outline(Checkpoint(found)), []
        if scans is not None:
            return examine(Checkpoint(found), scans, told)
        with TemporaryDirectory() as unkept:
            return examine(Checkpoint(found), Path(unkept), told)
    except SandhiError as error:
        return None, [error.problem.model_copy(update={"model": found.model})]


def _check_loading(found: Survey) -> None:
    """What transformers makes of the files, as far as nothing else is wrong with them."""
    faulty = {p.file for p in found.problems if p.severity == "error"}
    tokenizer_is_sound = not faulty & set(found.beside) and any(name in found.beside for name in TOKENIZERS)
    if found.config and CONFIG not in faulty:
        check_model_class(found)
    if tokenizer_is_sound:
        check_tokenizer_class(found)


def _check_quantised(found: Survey) -> None:
    """At most one problem for each sign of it: a flood would say nothing more."""
    reason = "quantised weights cannot be averaged"
    for setting in ("quantization_config", "compression_config"):
        if found.config.get(setting):
            found.report("quantised", f"has a {setting}; {reason}", _UNQUANTISED, CONFIG)
    helpers = [h for h in found.headers.values() if _QUANTISED.fullmatch(h.name)]
    weights = [h for h in found.headers.values() if h.name.endswith(".weight") and h.dtype not in DTYPE_BYTES]
    for first, *others in filter(None, (helpers, weights)):
        like = f" ({len(others)} more like it)" if others else ""
        said = f"is part of quantised weights{like}" if first in helpers else f"has dtype {first.dtype}{like}"
        found.report("quantised", f"{said}; {reason}", _UNQUANTISED, first.file, first.name)


def _check_tokenizer(found: Survey) -> None:
    again = "copy the tokenizer's files from the model that this one was trained from"
    if not any(name in found.beside for name in TOKENIZERS):
        message = "is missing, and so is every other tokenizer: no task can be asked"
        found.report("tokenizer-missing", message, again, TOKENIZER)
    if TOKENIZER not in found.beside or any(p.file == TOKENIZER for p in found.problems):
        return
    try:
        ids = token_ids(found.directory / TOKENIZER)
    except (ValueError, OSError) as error:
        found.report("tokenizer-invalid", str(error), again, TOKENIZER)
        return
    rows = found.config.get("vocab_size")
    beyond = sorted(token for token, i in ids.items() if type(rows) is int and i >= rows)
    if beyond:
        message = f"{len(beyond)} tokens, such as {beyond[0]!r}, have no row in the embeddings"
        remedy = "nothing, if such tokens never occur; else resize the embeddings"
        found.report("tokenizer-out-of-range", message, remedy, TOKENIZER, severity="warning")


def _mention_ignored(found: Survey) -> None:
    if found.ignored and found.complete:
        others = f" and {len(found.ignored) - 1} more files" if len(found.ignored) > 1 else ""
        message = f"{found.ignored[0]}{others} hold weights in other formats: neither read nor exported"
        found.report("weights-ignored", message, "nothing, or remove them", found.ignored[0], severity="warning")


def _mention_links(found: Survey) -> None:
    """Links out of the directory, but for those of the hub's cache to the files of the same repository."""
    home = found.directory.resolve()
    home = home.parent.parent if home.parent.name == "snapshots" else home
    paths = {file: found.directory / file for file in (*found.weights, *found.beside)}
    ends = {file: path.resolve() for file, path in paths.items() if path.is_symlink() and path.exists()}
    outside = [file for file, end in ends.items() if not end.is_relative_to(home)]
    if outside:
        others = f" ({count(len(outside), 'file')} of the model do)" if len(outside) > 1 else ""
        message = f"leads out of the checkpoint, to {ends[outside[0]]}{others}: what is there is read and exported"
        found.report("link-outside", message, "nothing, if that is meant", outside[0], severity="warning")
