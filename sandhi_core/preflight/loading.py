"""Whether stock transformers can make a model and a tokenizer of the files, tried without reading a weight.

Fine-tunes of one base have the same configuration and tokenizer: what is equal in content is tried once.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sandhi_core.checkpoints.architectures import ARCHITECTURES
from sandhi_core.checkpoints.survey import CONFIG
from sandhi_core.checkpoints.survey_files import Survey, read_json
from sandhi_core.checkpoints.vocabulary import TOKENIZERS

TOKENIZER_CONFIG = "tokenizer_config.json"
_SOURCE = "take the file from the model's source again, or correct it"
_TOKENIZER_SOURCE = "copy the tokenizer's files from the model that this one was trained from"


def check_model_class(found: Survey) -> None:
    """Report what keeps transformers from building the model that the configuration describes, and servers from
    taking it for a causal language model."""
    _mention_remote_code(found, CONFIG, found.config)
    model_type = found.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        return  # told once the weights can be read
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    named = found.config.get("architectures") or [expected]
    if named != [expected]:
        message = f"names the architectures {named!r}, but the model is scored and served as {expected}"
        remedy = f"set architectures to [{expected}] if the weights are those of one, else leave this model out"
        found.report("architectures-mismatch", message, remedy, CONFIG)
    if reason := _no_model(model_type, _said(found)):
        found.report("config-unusable", f"transformers can make no model of it: {reason}", _SOURCE, CONFIG)


def _said(found: Survey) -> str:
    """What a configuration says but for where the model came from."""
    return json.dumps({name: value for name, value in found.config.items() if name != "_name_or_path"})


@lru_cache(maxsize=256)
def _no_model(model_type: str, config: str) -> str | None:
    """Why there is no model of a configuration (as JSON); None where there is one."""
    try:
        read = CONFIG_MAPPING[model_type].from_dict(json.loads(config))
        with torch.device("meta"):  # shapes only: neither memory nor time grows with the model
            AutoModelForCausalLM.from_config(read, trust_remote_code=False)
    except Exception as error:  # a model's own code raises whatever comes up
        return _reason(error)
    return None


def check_tokenizer_class(found: Survey) -> None:
    """Report what keeps transformers from loading the tokenizer; one of its files must lie beside the weights."""
    if TOKENIZER_CONFIG in found.beside:
        try:
            _mention_remote_code(found, TOKENIZER_CONFIG, read_json(found.directory / TOKENIZER_CONFIG))
        except (ValueError, OSError) as error:
            found.report("tokenizer-unusable", str(error), _TOKENIZER_SOURCE, TOKENIZER_CONFIG)
            return
    try:
        files = _Files(found.directory, _digest(found))
    except OSError as error:
        found.report("tokenizer-unusable", f"cannot be read: {error.strerror}", _TOKENIZER_SOURCE, TOKENIZER_CONFIG)
        return
    if reason := _no_tokenizer(files):
        message = f"transformers cannot load the tokenizer: {reason}"
        file = next(name for name in TOKENIZERS if name in found.beside)
        found.report("tokenizer-unusable", message, _TOKENIZER_SOURCE, file)


@dataclass(frozen=True)
class _Files:
    """What a tokenizer may be made of; equal by content, wherever it lies."""

    directory: Path = field(compare=False)
    digest: str


def _digest(found: Survey) -> str:
    digest = hashlib.sha256(_said(found).encode())
    for name in found.beside:
        if name != CONFIG:
            with (found.directory / name).open("rb") as f:
                digest.update(os.fsencode(name) + f":{hashlib.file_digest(f, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _no_tokenizer(files: _Files) -> str | None:
    """Why there is no tokenizer of a directory's files; None where there is one."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        AutoTokenizer.from_pretrained(files.directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers in Rust and Python raise whatever comes up
        return _reason(error)
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    return None


def _mention_remote_code(found: Survey, file: str, content: dict[str, object]) -> None:
    if content.get("auto_map"):
        message = "names code of its own (auto_map), which is never run: transformers' own classes are used"
        found.report("remote-code", message, "nothing, if those classes are equivalent", file, severity="warning")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
