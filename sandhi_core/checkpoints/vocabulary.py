"""Tokenizers, as far as they decide whether two models' embeddings can be compared."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from sandhi_core.checkpoints.survey_files import json_object

TOKENIZER = "tokenizer.json"
TOKENIZERS = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files of which a text model has at least one."""


def token_ids(path: Path) -> dict[str, int]:
    """Every token's id, from a tokenizer.json; added tokens included.

    Sizes say nothing: two tokenizers of one size can number their tokens differently. Raises ValueError with a
    reason where the file is no tokenizer, OSError where it cannot be read. Not to be changed: fine-tunes of one base
    have equal files, which are read but once taken apart.
    """
    return _numbered(path.read_bytes())


@lru_cache(maxsize=4)
def _numbered(text: bytes) -> dict[str, int]:
    data = json_object(text)
    model = data.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
        vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise ValueError("has no vocabulary")
    ids: dict[str, Any] = dict(vocabulary)
    added = data.get("added_tokens") or []
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            ids[token["content"]] = token.get("id")
    if any(type(i) is not int for i in ids.values()):
        raise ValueError("has tokens without a number")
    return ids


def spoken(directory: Path) -> dict[str, int]:
    """Every token's id as a model is asked with it: by the tokenizer that transformers makes of all of the directory's
    files. Empty where it makes none (a checkpoint that passed its checks has one)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        return {str(token): int(number) for token, number in tokenizer.get_vocab().items()}
    except Exception:  # tokenizers in Rust and Python raise whatever comes up
        return {}
