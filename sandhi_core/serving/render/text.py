"""YAML as bytes."""

from collections.abc import Sequence
from typing import Any

import yaml


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice: references are hard to read and to edit."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def yaml_bytes(*documents: Any, head: Sequence[str] = ()) -> bytes:
    """Documents of one file in the order of their keys, below comment lines."""
    text = yaml.dump_all(
        documents,
        Dumper=_Plain,
        sort_keys=False,
        allow_unicode=True,
        width=1000,
        explicit_start=len(documents) > 1,
    )
    return "".join((*(f"# {line}\n" for line in head), text)).encode()
