"""Has the models of a pool trained by a few processes, each model after its base, and says how long it will take."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from demo.roster import Model, Size

REPORT_SECONDS = 5.0
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Worker:
    """A training process and what it is at."""

    process: subprocess.Popen[bytes]
    model: Model | None = None
    unfinished: bytes = b""  # a line of which the end has yet to come


@dataclass
class Progress:
    """Steps done of each model, and an estimate of the seconds left."""

    size: Size
    jobs: int
    busy: float = 0.0  # worker-seconds since the first step
    ticked: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)
    steps: dict[str, int] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)

    def tick(self, working: int) -> None:
        """Count the time since the last tick for each worker that has been at a model."""
        now = time.monotonic()
        if self.steps:
            self.busy += (now - self.ticked) * working
        self.ticked = now

    def work(self, model: Model) -> tuple[float, float]:
        """Work done and work left; a step costs about its matrix products."""
        step = model.layers * model.hidden**2
        done = model.steps if model.name in self.saved else self.steps.get(model.name, 0)
        return float(step * done), float(step * (model.steps - done))

    def seconds_left(self) -> float:
        """What is left, at the speed so far. The specialists cannot begin before the base is there."""
        left = {model.name: self.work(model)[1] for model in self.size.models}
        tuned = sum(left[model.name] for model in self.size.models if model.base is not None)
        first = [left[model.name] for model in self.size.models if model.base is None]
        wall = max(max(first), sum(first) / self.jobs) + tuned / self.jobs
        done = sum(self.work(model)[0] for model in self.size.models)
        return wall * self.busy / done

    def show(self) -> None:
        """Say where things stand, but not too often."""
        if self.ticked - self.shown < REPORT_SECONDS or self.busy < REPORT_SECONDS:
            return
        self.shown = self.ticked
        running = [model for model in self.size.models if model.name in self.steps and model.name not in self.saved]
        state = "".join(f", {model.name} {self.steps[model.name] / model.steps:.0%}" for model in running)
        count = f"{len(self.saved)} of {len(self.size.models)} models trained"
        print(f"{count}{state}, about {self.seconds_left():.0f} s left", file=sys.stderr, flush=True)


def start(size_name: str, folder: Path, lock: int) -> Worker:
    """Start a training process: one thread, offline, and holding the pool's lock for as long as it lives."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "demo.train", size_name, str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, pass_fds=(lock,)
    )
    return Worker(process)


def hand_out(workers: list[Worker], waiting: list[Model], saved: set[str]) -> None:
    """Give every idle worker the first model whose base is there."""
    for worker in workers:
        ready = next((model for model in waiting if model.base is None or model.base in saved), None)
        if worker.model is None and ready is not None and worker.process.stdin is not None:
            waiting.remove(ready)
            worker.model = ready
            os.write(worker.process.stdin.fileno(), f"{ready.name}\n".encode())


def listen(worker: Worker, progress: Progress) -> None:
    """Take in what a worker says. One that ends before it is told to has failed."""
    said = os.read(worker.process.stdout.fileno(), 1 << 16) if worker.process.stdout else b""
    if not said:
        raise RuntimeError(f"training {worker.model.name if worker.model else 'nothing'} failed; see above")
    *lines, worker.unfinished = (worker.unfinished + said).split(b"\n")
    for name, state in (text.decode().split() for text in lines):
        if state == "saved":
            progress.saved.add(name)
            worker.model = None
        else:
            progress.steps[name] = int(state)


def train_all(size_name: str, size: Size, folder: Path, jobs: int, lock: int) -> None:
    """Train every model of the pool into the folder."""
    waiting = list(size.models)
    progress = Progress(size, jobs)
    workers = [start(size_name, folder, lock) for _ in range(min(jobs, len(waiting)))]
    try:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            while len(progress.saved) < len(size.models):
                hand_out(workers, waiting, progress.saved)
                events = selector.select()
                progress.tick(sum(worker.model is not None for worker in workers))
                for key, _ in events:
                    listen(key.data, progress)
                progress.show()
    finally:
        for worker in workers:
            worker.process.kill()  # each is idle by now, unless one has failed
            worker.process.communicate()
