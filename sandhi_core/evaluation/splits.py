"""Which questions may be used for what: by a hash of the question itself, never by its place in a list."""

import hashlib
from collections.abc import Mapping
from typing import Any

from sandhi_core.errors import TaskError
from sandhi_core.pools.pool import Splits
from sandhi_core.records import Split, canonical_json


def split_of(document: Mapping[str, Any], seed: int, splits: Splits) -> Split:
    """The split that `document` falls into.

    sha256 of the canonical JSON of document and seed, read as a number u uniform in [0, 1): profile below
    `splits.profile`, then search, the rest holdout. Equal documents always fall together, wherever they stand
    and whatever else the task holds; another seed deals all anew.

    Raises TaskError for a document that is not JSON (NaN, bytes, pictures).
    """
    try:
        text = canonical_json({"document": document, "seed": seed})
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"a document of the task is not plain JSON: {error}",
            remedy="let the task's data hold text, finite numbers, booleans, null, lists and mappings only",
        ) from None
    u = (int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 11) / 2**53  # 53 bits: exact in a double
    if u < splits.profile:
        return "profile"
    return "search" if u < splits.profile + splits.search else "holdout"
