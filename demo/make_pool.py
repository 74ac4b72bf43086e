"""Makes the demo pool: tasks by rule, a tokenizer, a base, its specialists and an outsider, under one folder.

The folder appears complete or not at all, and a second run on the same sources does nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from demo.crew import train_all
from demo.roster import SIZES
from demo.tasks import write_tasks
from demo.text import train_tokenizer

STAMP = "pool.json"
EXAMPLE = "example:\n  python -m demo.make_pool .sandhi-demo --size demo --jobs 2"


def digest() -> str:
    """What the bytes of a pool depend on: the text of this package and the libraries that train and write."""
    state = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for library in ("torch", "transformers", "tokenizers", "safetensors"):
        state.update(f"{library}=={version(library)}\n".encode())
    return state.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a lock file; the training processes inherit it, so no orphan of a killed run can write beside a new one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def sync(folder: Path) -> None:
    """Flush every file and directory under the folder to disk."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def publish(partial: Path, out: Path) -> None:
    """Put the finished folder in its place, and take the outdated one away."""
    sync(partial)
    if out.exists():
        outdated = out.with_name(f"{out.name}.partial-outdated")
        out.rename(outdated)
        partial.rename(out)
        shutil.rmtree(outdated)
    else:
        partial.rename(out)
    sync_parent = os.open(out.parent, os.O_RDONLY)
    os.fsync(sync_parent)
    os.close(sync_parent)


def make_pool(out: Path, size_name: str, jobs: int) -> bool:
    """Make the pool unless it is there already; returns whether it had to be made."""
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    stamp = json.dumps({"size": size_name, "digest": digest()}, indent=1) + "\n"
    with locked(out.with_name(f".{out.name}.lock")) as lock:
        written = out / STAMP
        if written.exists() and written.read_text(encoding="utf-8") == stamp:
            return False
        if out.exists() and not written.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} holds something that is not a demo pool; choose another folder")
        for leftover in out.parent.glob(f"{out.name}.partial-*"):
            shutil.rmtree(leftover)
        partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
        size = SIZES[size_name]
        write_tasks(partial / "tasks")
        train_tokenizer(size.vocabulary, partial / "tokenizer.json")
        train_all(size_name, size, partial, jobs, lock)
        (partial / STAMP).write_text(stamp, encoding="utf-8")
        publish(partial, out)
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.make_pool",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--size", choices=sorted(SIZES), default="demo", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="models trained at once, one core each; default: 2")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    started = time.monotonic()
    try:
        made = make_pool(options.out, options.size, options.jobs)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"{options.out}: " + (f"made in {seconds:.0f} s" if made else "already complete"), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
