"""What models take in the memory of the servers that serve them: started, asked, looked at, ended."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from sandhi_core.claims import claims_of
from sandhi_core.errors import ServingError
from sandhi_core.memory import Holder, Identity, accounts, shared_bytes, shared_files, weight_files, weights_in
from sandhi_core.records import Manifest, MemoryComparison, ProcessMemory
from sandhi_core.serving.completions import Completion, complete, fetch
from sandhi_core.serving.together import TIMEOUT, Engines, Served, serving

NEW_TOKENS = 8
"""Tokens that a server is asked for after a prompt."""
REQUESTS = ((1, 2, 3, 4, 5, 6, 7), (7, 6, 5, 4, 3, 2, 1), (1, 1, 2, 2))
"""Prompts by their tokens, which any vocabulary has: what is measured is a server that answers."""
Prompts = Mapping[str, Sequence[Sequence[int]]]
"""By model, the tokens of prompts."""


@dataclass(frozen=True)
class Held:
    """What servers held while they answered: `engine` in words, `holders` their processes, and by model the
    `completions` of its prompts and the `seconds` that one took on average."""

    engine: str
    holders: tuple[Holder, ...]
    completions: Mapping[str, tuple[Completion, ...]]
    seconds: Mapping[str, float]


def hold(
    directories: Mapping[str, Path],
    engine: Engines = "transformers",
    python: str = "",
    *,
    plugin: bool = True,
    prompts: Prompts | None = None,
    timeout: float = TIMEOUT,
) -> Held:
    """Serve every model's directory, all at once; ask each (`prompts`, or a few of no meaning); read what their
    processes map; end them. `python`, `plugin`: as `together.serving` has them.

    Raises ServingError where a directory cannot be loaded, not all are within `timeout` seconds, or one gives no
    answer; and what `together.serving` raises before anything is started.
    """
    with serving(engine, directories, python, plugin=plugin, timeout=timeout) as servers:
        completions, seconds = {}, {}
        for one in servers:
            began = time.monotonic()
            completions[one.model] = _asked(one, (prompts or {}).get(one.model, REQUESTS))
            seconds[one.model] = (time.monotonic() - began) / max(len(completions[one.model]), 1)
        files = weight_files(*directories.values())
        holders = [found for one in servers for found in _held(one, one.holders(files))]
        return Held(_named(servers, plugin), tuple(holders), completions, seconds)


def _asked(server: Served, prompts: Sequence[Sequence[int]]) -> tuple[Completion, ...]:
    for prompt in prompts:
        if len(prompt) + NEW_TOKENS > server.context:
            message = f"a prompt of {len(prompt)} tokens leaves no room for {NEW_TOKENS} of {server.context}"
            raise ServingError(message, model=server.model, remedy="give shorter prompts")
    return tuple(complete(server.url, server.model, prompt, NEW_TOKENS) for prompt in prompts)


def _held(server: Served, found: list[Holder]) -> list[Holder]:
    """vLLM on a CPU packs what it does not map, and no parameter says so: what is mapped nowhere must be held by its
    first worker, in the dtype of the files."""
    if server.engine == "transformers":
        return found
    first, *rest = found
    resident: Counter[Identity] = Counter()  # of each file, in the process that has most of it
    for one in found:
        own: Counter[Identity] = Counter()
        for identity, span in one.spans:
            own[identity] += span.rss
        resident |= own
    mapped = sum(min(rss, first.sizes[identity]) for identity, rss in resident.items())
    least = weights_in(server.directory).total() - mapped - sum(one.unmapped for one in rest)
    return [replace(first, unmapped=max(first.unmapped, least)), *rest]


def _named(servers: Sequence[Served], plugin: bool) -> str:
    """The engines; of two, that of most models first, and the other with its models."""
    by_engine: dict[str, list[Served]] = {}
    for server in servers:
        by_engine.setdefault(server.engine, []).append(server)
    first, *rest = sorted(by_engine.values(), key=len, reverse=True)
    others = (f"{', '.join(one.model for one in found)}: {_engine_named(found[0], plugin)}" for found in rest)
    return "; ".join((_engine_named(first[0], plugin), *others))


def _engine_named(server: Served, plugin: bool) -> str:
    if server.engine == "transformers":
        return f"transformers {version('transformers')} (sandhi_core.serving.load), one process a model, CPU"
    found = fetch(f"{server.url}/version", server.model)["version"]
    return f"vLLM {found}{' with the plugin' if plugin else ''}, one OpenAI server a model, CPU"


def compare(
    originals: Mapping[str, Path],
    export_root: Path,
    manifest: Manifest,
    engine: Engines = "transformers",
    python: str = "",
) -> MemoryComparison:
    """The same models served from their original directories, by their engines as they are, then from the export.
    Raises as hold does."""
    before, after = (
        hold(originals, engine, python, plugin=False),
        hold(served_from(export_root, manifest), engine, python),
    )
    first, second = accounts(before.holders), accounts(after.holders)
    return MemoryComparison(
        engine=after.engine,
        originals=first,
        exports=second,
        shared=shared(after, export_root, manifest),
        saved=taken(first) - taken(second),
    )


def served_from(export_root: Path, manifest: Manifest) -> dict[str, Path]:
    """By name, the directories of an export's models."""
    return {name: export_root / model.directory for name, model in sorted(manifest.models.items())}


def shared(held: Held, export_root: Path, manifest: Manifest) -> int:
    """Bytes that servers of an export spare by mapping the same files, less what its models add, as far as it claims
    them."""
    claims = claims_of(manifest)
    found = shared_bytes(held.holders, shared_files(export_root, manifest)) - claims.added
    return min(max(found, 0), claims.claimed)


def taken(processes: Sequence[ProcessMemory]) -> int:
    """Bytes of weights that processes take together."""
    return sum(process.pss + process.unmapped for process in processes)
