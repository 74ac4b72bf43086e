"""The ways of scoring that are held against each other: ours, lm-eval's own model kept in memory, and a new process
of lm-eval for every changed checkpoint."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.questions import SPLIT, shortened, taken
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.tasks import Suite
from sandhi_core.evaluation.tokenised import TokenisedOnceLM
from sandhi_core.pools.pool import EvaluationSettings
from sandhi_core.records import TaskResult

BATCH_TOKENS = EvaluationSettings().batch_tokens
TRIED = 40
"""Questions of each task on which batch sizes are tried."""


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def commit() -> str:
    """Of the code that is measured; a plus where the tree has changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout
    return name + "+" * bool(changed)


@dataclass
class Clock:
    """Seconds by what they were spent on, and how often."""

    spent: dict[str, float] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - started
        self.times[what] = self.times.get(what, 0) + 1

    def mean(self, what: str) -> float:
        return self.spent[what] / self.times[what]


@dataclass
class Agreement:
    """Decisions that two ways made on the same questions under the same weights."""

    compared: int = 0
    differing: int = 0

    def add(self, ours: list[Any], theirs: list[Any]) -> None:
        self.compared += len(ours)
        self.differing += sum(a != b for a, b in zip(ours, theirs, strict=True))

    def __str__(self) -> str:
        if not self.differing:
            return f"all {self.compared} equal"
        return f"{self.differing} of {self.compared} differ"


def resident(directory: Path, threads: int, cache: str | None = None) -> Resident:
    """The model as the product holds it, in float32 on the CPU."""
    given = {"device": "cpu", "dtype": "float32", "threads": threads, "cache_memory": cache}
    return Resident(directory, directory.name, EvaluationSettings.model_validate(given))


def start() -> None:
    """A new process that imports what ours needs: the other ways' processes pay that too."""
    subprocess.run([sys.executable, "-c", "import sandhi_core.evaluation.resident"], check=True)


class Theirs:
    """lm-eval's own HF model over the very model that ours holds, at the fastest batch size for `asked`: 16, 64, or
    as many of the longest request as ours computes tokens at once. (Our hooks stand aside: they cost it nothing.)"""

    def __init__(self, held: Resident, asked: Suite) -> None:
        # As ours does, so that neither way pays for tokenising twice.
        self._lm = TokenisedOnceLM(pretrained=held.model, tokenizer=held.scorer.tokenizer, batch_size=16)
        self._asked = asked
        self.batch = self._fastest()

    def _fastest(self) -> int:
        part = shortened(self._asked, TRIED)
        texts = [r.args[0] + (r.args[1] if isinstance(r.args[1], str) else "") for r in _requests(self._asked)]
        longest = max(len(self._lm.tok_encode(text)) for text in texts)
        seconds = {}
        _answer(self._lm, shortened(self._asked, 2), 16)
        for size in sorted({16, 64, max(1, BATCH_TOKENS // longest)}):
            begun = time.perf_counter()
            _answer(self._lm, part, size)
            seconds[size] = time.perf_counter() - begun
        say(f"lm-eval's batch sizes, seconds: {', '.join(f'{n}: {s:.1f}' for n, s in seconds.items())}")
        return min(seconds, key=lambda size: seconds[size])

    def answers(self) -> dict[str, TaskResult]:
        """As Resident.answers."""
        _answer(self._lm, self._asked, self.batch)
        return {task.name: task.result(SPLIT) for task in self._asked.tasks}


def _requests(asked: Suite) -> list[Any]:
    return [r for task in asked.tasks for question in task.questions[SPLIT] for r in question.requests]


@torch.inference_mode()
def _answer(lm: TokenisedOnceLM, asked: Suite, size: int) -> None:
    lm.batch_size_per_gpu = size
    for kind, requests in asked.requests(SPLIT).items():
        for request, response in zip(requests, getattr(lm, kind)(requests, disable_tqdm=True), strict=True):
            request.resps.append(response)


def process(checkpoint: Path, tasks: Path, asked: Suite, threads: int, out: Path) -> list[Any]:
    """The decisions of a new `lm_eval` process on a checkpoint, at the batch size that the reference's recorded runs
    asked for (`auto`). Raises RuntimeError where it fails."""
    names = [task.name for task in asked.tasks]
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"),
        *("--model_args", f"pretrained={checkpoint},dtype=float32", "--batch_size", "auto"),
        *("--tasks", ",".join(names), "--include_path", str(tasks)),
        *("--output_path", str(out), "--log_samples"),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HOME": str(out.parent / "home"),
        "HF_DATASETS_CACHE": str(out.parent / "home" / "datasets"),
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"lm_eval failed:\n{ended.stderr[-2000:]}")
    found: list[Any] = []
    for name in names:
        (samples,) = out.glob(f"**/samples_{name}_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
        found += [taken([float(likelihood) for likelihood, _ in line["filtered_resps"]]) for line in lines]
    return found
