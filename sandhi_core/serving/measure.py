"""What models take in the memory of the servers that serve them: started, asked, looked at, ended."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from sandhi_core.errors import ServingError
from sandhi_core.memory import Holder, Identity, accounts, weights_in
from sandhi_core.records import MemoryComparison, ProcessMemory
from sandhi_core.serving.completions import Completion, complete, fetch
from sandhi_core.serving.engines import TIMEOUT, Engine, Member, serving

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
    engine: Engine = "transformers",
    python: str = "",
    *,
    plugin: bool = True,
    prompts: Prompts | None = None,
    timeout: float = TIMEOUT,
) -> Held:
    """Serve every model's directory, all at once; ask each (`prompts`, or a few of no meaning); read what their
    processes map; end them. `python`, `plugin`: as `engines.serving` has them.

    Raises ServingError where a directory cannot be loaded, not all are within `timeout` seconds, or one gives no
    answer.
    """
    with serving(engine, directories, python, plugin=plugin, timeout=timeout) as members:
        completions, seconds = {}, {}
        for member in members:
            began = time.monotonic()
            completions[member.model] = _asked(member, (prompts or {}).get(member.model, REQUESTS))
            seconds[member.model] = (time.monotonic() - began) / max(len(completions[member.model]), 1)
        holders = [one for member in members for one in _held(member, engine, member.holders())]
        return Held(_named(engine, members, plugin), tuple(holders), completions, seconds)


def _asked(member: Member, prompts: Sequence[Sequence[int]]) -> tuple[Completion, ...]:
    for prompt in prompts:
        if len(prompt) + NEW_TOKENS > member.context:
            message = f"a prompt of {len(prompt)} tokens leaves no room for {NEW_TOKENS} of {member.context}"
            raise ServingError(message, model=member.model, remedy="give shorter prompts")
    return tuple(complete(member.url, member.model, prompt, NEW_TOKENS) for prompt in prompts)


def _held(member: Member, engine: Engine, found: list[Holder]) -> list[Holder]:
    """vLLM on a CPU packs what it does not map, and no parameter says so: what is mapped nowhere must be held by its
    first worker, in the dtype of the files."""
    if engine == "transformers":
        return found
    first, *rest = found
    resident: Counter[Identity] = Counter()  # of each file, in the process that has most of it
    for one in found:
        own: Counter[Identity] = Counter()
        for identity, span in one.spans:
            own[identity] += span.rss
        resident |= own
    mapped = sum(min(rss, first.sizes[identity]) for identity, rss in resident.items())
    least = weights_in(member.directory).total() - mapped - sum(one.unmapped for one in rest)
    return [replace(first, unmapped=max(first.unmapped, least)), *rest]


def _named(engine: Engine, members: Sequence[Member], plugin: bool) -> str:
    if engine == "transformers":
        return f"transformers {version('transformers')} (sandhi_core.serving.load), one process a model, CPU"
    found = json.loads(fetch(f"{members[0].url}/version"))["version"]
    return f"vLLM {found}{' with the plugin' if plugin else ''}, one OpenAI server a model, CPU"


def measure(directories: Mapping[str, Path], timeout: float = TIMEOUT) -> tuple[ProcessMemory, ...]:
    """What the weights of models held at once by transformers take, by process. Raises as hold does."""
    return accounts(hold(directories, timeout=timeout).holders)


def compare(
    originals: Mapping[str, Path], exports: Mapping[str, Path], engine: Engine = "transformers", python: str = ""
) -> MemoryComparison:
    """The same models served from their original directories, by the engine as it is, then from the exports. Raises as
    hold does."""
    before, after = hold(originals, engine, python, plugin=False), hold(exports, engine, python)
    first, second = accounts(before.holders), accounts(after.holders)
    return MemoryComparison(engine=after.engine, originals=first, exports=second, saved=taken(first) - taken(second))


def taken(processes: Sequence[ProcessMemory]) -> int:
    """Bytes of weights that processes take together."""
    return sum(process.pss + process.unmapped for process in processes)
