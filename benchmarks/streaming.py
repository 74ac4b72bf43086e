"""How fast and in how much memory weights are read, merged and exported, beside `cp` and mergekit.

    python -m benchmarks.streaming --work FOLDER [--rounds 5] [--mergekit FOLDER] [--out benchmarks/streaming]

Two random models of two GB each (the shape of Llama 3.2 1B with a smaller vocabulary), made below FOLDER, which should
lie where checkpoints and artifact roots do. Rounds of all ways one after another, each in a process of its own, so that
whatever else the machine does strikes all alike; a ratio is that of one round, the table has the median.

- cp: both checkpoints copied by `cp`, then `sync` of the copies: what any way costs that reads and writes all bytes
- check: every byte of both read once for digests, statistics and NaN
- export: both exported with nothing shared: every byte read, held to its digest, written and flushed to the disk
- merge and export: all projections averaged, made ahead as a build makes them, and both models exported with them
- mergekit: its linear merge of the two, which gives one model (no digests, not flushed)

Speed counts the bytes of both checkpoints, which come from memory as a rule, since the machine has just seen them.
`written` is what then lies on the disk: what is merged lies there once instead of twice, so that merging writes half of
what `cp` does; but it reads what it merges twice (digest, mean), and what it wrote once more. `anonymous` is the most
memory that cannot be dropped (RssAnon, looked at every 20 ms), less what the process had after its imports; `resident`
the same of all, mapped pages of files included.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig

from benchmarks.rows import seconds, table
from benchmarks.scale import made_up
from benchmarks.ways import say
from sandhi_core.assignment import Assignment
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.safetensors_file import Entry, raw_bytes, write_safetensors
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.export import export_pool
from sandhi_core.grouping.groups import make_groups
from sandhi_core.pools.pool import Pool
from sandhi_core.recipes import SharedTensors
from sandhi_core.records import Contributor, Fingerprint
from sandhi_core.rungs.grams import Gram
from sandhi_core.store import Store

NAMES = ("a", "b")
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Took:
    """One way in one round."""

    way: str
    seconds: float
    cpu: float
    read: int
    written: int
    anonymous: int
    resident: int


def make_models(folder: Path) -> None:
    """Both checkpoints, where they are not there yet."""
    for seed, name in enumerate(NAMES):
        directory = folder / name
        if (directory / "model.safetensors").exists():
            continue
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
        config.save_pretrained(directory)
        made = torch.Generator().manual_seed(seed)
        tensors = {n: torch.empty(s, dtype=torch.bfloat16).normal_(0, 0.02, generator=made) for n, s in _shapes(config)}
        entries = [Entry(n, "BF16", tuple(t.shape), raw_bytes(t)) for n, t in tensors.items()]
        write_safetensors(directory / "model.safetensors", entries)


def _shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    yield from ((n, tuple(t.shape)) for n, t in network.state_dict().items() if n != "lm_head.weight")


# --- the ways, each in a process of its own -----------------------------------------------------------------


def _opened(folder: Path) -> dict[str, Checkpoint]:
    return {name: Checkpoint.open(folder / name, name) for name in NAMES}


def _pool(folder: Path) -> Pool:
    task = {"task": "none", "metric": "acc", "budget": 0.1}
    models = [{"name": name, "path": str(folder / name), "tasks": [task]} for name in NAMES]
    return Pool.model_validate({"name": "pair", "models": models})


def do_check(folder: Path, out: Path) -> None:
    for checkpoint in _opened(folder).values():
        fingerprint(checkpoint, out / "scans")


def do_export(folder: Path, out: Path) -> None:
    _export(folder, out, {})


def do_merge(folder: Path, out: Path) -> None:
    opened, found = _opened(folder), _scanned(folder)
    profiles = {name: made_up(f) for name, f in found.items()}
    pool = _pool(folder)
    groups = make_groups("pair", "all", found, profiles, pool.grouping, pool.merging, pool.profile.gate, None)
    shared = SharedTensors(Store(out / "store"), folder / "scans", lambda m: (opened[m], found[m]), _no_gram)
    tensors: dict[str, dict[str, str]] = {name: {} for name in NAMES}
    shared.prepare(group.recipe for group in groups.groups)
    for group in groups.groups:
        digest = shared.digest(group.recipe)
        for slot in group.members:
            tensors[slot.model][slot.tensor] = digest
    _export(folder, out, {name: Assignment(held) for name, held in tensors.items()})


def _no_gram(contributor: Contributor) -> Gram:
    raise ValueError(f"{contributor.tensor} is averaged without moments")


def _scanned(folder: Path) -> dict[str, Fingerprint]:
    """As a build has them by then."""
    return {n: fingerprint(c, folder / "scans") for n, c in _opened(folder).items()}


def _export(folder: Path, out: Path, assignments: dict[str, Assignment]) -> None:
    (out / "exports").mkdir(parents=True, exist_ok=True)
    export_pool(
        _pool(folder),
        "none",
        _opened(folder),
        _scanned(folder),
        assignments,
        dict.fromkeys(NAMES, "none"),
        Store(out / "store"),
        out / "exports",
    )


DO = {"check": do_check, "export": do_export, "merge and export": do_merge}


def do(way: str, folder: Path, out: Path) -> None:
    """Writes beside `out` what it took, and what this process was before it began."""
    anonymous, resident, _ = _memory(os.getpid())
    begun, cpu = time.perf_counter(), time.process_time()
    DO[way](folder, out)
    took = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    _took(out).write_text(json.dumps({**took, "anonymous": anonymous, "resident": resident}))


def _took(out: Path) -> Path:
    return out.with_name("took.json")


# --- measuring ----------------------------------------------------------------------------------------------


def _measured(way: str, folder: Path, out: Path, commands: Sequence[Sequence[str]]) -> Took:
    begun, cpu, anonymous, resident = time.perf_counter(), 0.0, 0, 0
    for command in commands:
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            while process.poll() is None:
                now = _memory(process.pid)
                anonymous, resident = max(anonymous, now[0]), max(resident, now[1])
                cpu = max(cpu, now[2])
                time.sleep(0.02)
        if process.returncode:
            raise RuntimeError(f"{way} failed: {' '.join(command)}")
    took = time.perf_counter() - begun
    if way in DO:
        own = json.loads(_took(out).read_bytes())
        took, cpu = own["seconds"], own["cpu"]
        anonymous, resident = anonymous - own["anonymous"], resident - own["resident"]
    nbytes = sum(f.stat().st_size for n in NAMES for f in (folder / n).glob("*.safetensors"))
    return Took(way, took, cpu, nbytes, _written(out), anonymous, resident)


def _written(out: Path) -> int:
    """Bytes of all files, one with several names counted once."""
    found = (path.stat() for path in out.rglob("*") if path.is_file())
    return sum({status.st_ino: status.st_size for status in found}.values())


def _memory(pid: int) -> tuple[int, int, float]:
    """RssAnon and RssFile together with it, in bytes, and seconds of processor time; noughts of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0, 0.0
    rss = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("Rss")}
    own = rss.get("RssAnon", 0)
    return own, own + rss.get("RssFile", 0), (int(times[11]) + int(times[12])) / 100


def _commands(way: str, folder: Path, out: Path, mergekit: Path | None) -> list[list[str]]:
    match way:
        case "cp":
            copies = [str(out / n) for n in NAMES]
            files = [f"{c}/model.safetensors" for c in copies]
            return [["cp", "-r", *(str(folder / n) for n in NAMES), str(out)], ["sync", *files]]
        case "mergekit":
            assert mergekit is not None
            models = [{"model": str(folder / n), "parameters": {"weight": 1.0}} for n in NAMES]
            recipe = {"merge_method": "linear", "models": models, "dtype": "bfloat16"}
            (out / "recipe.yaml").write_text(yaml.safe_dump(recipe))
            program = str(mergekit / "bin" / "mergekit-yaml")
            return [[program, str(out / "recipe.yaml"), str(out / "merged"), "--quiet"]]
        case _:
            return [[sys.executable, "-m", "benchmarks.streaming", "--do", way, "--work", str(folder), str(out)]]


def run(folder: Path, rounds: int, mergekit: Path | None) -> list[Took]:
    make_models(folder)
    _scanned(folder)
    ways = ["cp", "check", "export", "merge and export", *(["mergekit"] if mergekit else [])]
    found, out = [], folder / "out"
    for n in range(rounds):
        for way in ways:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            subprocess.run(["sync"], check=True)
            took = _measured(way, folder, out, _commands(way, folder, out, mergekit))
            say(f"round {n + 1}, {way}: {took.seconds:.1f} s, {took.cpu:.1f} s of the processor")
            found.append(took)
    shutil.rmtree(out, ignore_errors=True)
    _took(out).unlink()
    return found


def shown(found: Sequence[Took]) -> str:
    def of(way: str) -> list[Took]:
        return [t for t in found if t.way == way]

    lines = []
    for way in dict.fromkeys(t.way for t in found):
        took, cps = of(way), of("cp")
        lines.append(
            (
                way,
                seconds(statistics.median(t.seconds for t in took)),
                seconds(statistics.median(t.cpu for t in took)),
                f"{statistics.median(t.read / t.seconds for t in took) / 1e6:,.0f}",
                f"{statistics.median(c.seconds / t.seconds for c, t in zip(cps, took, strict=True)):.2f}",
                *(f"{max(getattr(t, f) for t in took) / 2**20:,.0f}" for f in ("written", "anonymous", "resident")),
            )
        )
    head = ("way", "s", "processor, s", "MB/s read", "speed of cp", "written, MiB", "anonymous, MiB", "resident, MiB")
    return f"{table(head, lines)}\n\nOurs without starting Python and importing, and less the memory held then."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and output, 15 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mergekit", type=Path, help="where its environment is or will be made")
    parser.add_argument("--out", type=Path, help="write PATH.txt and PATH.json too")
    parser.add_argument("--do", choices=DO, help=argparse.SUPPRESS)
    parser.add_argument("to", nargs="?", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        do(given.do, given.work, given.to)
        return
    if given.mergekit:
        from benchmarks.wholes import environment

        environment(given.mergekit)
    found = run(given.work, given.rounds, given.mergekit)
    text = shown(found)
    print(text)
    if given.out is not None:
        given.out.with_suffix(".txt").write_text(text + "\n")
        given.out.with_suffix(".json").write_text(json.dumps([asdict(t) for t in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
