"""Exports that somebody or something touched, and exports that were killed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandhi_core.checkpoints.safetensors_file import Entry, map_file, write_safetensors
from sandhi_core.checkpoints.survey_files import INDEX
from sandhi_core.disk import verify_disk
from sandhi_core.errors import Problem, ProofError
from sandhi_core.layout import MANIFEST, read_manifest
from sandhi_core.verification.exports import verify
from tests.deployed import deployed
from tests.exported import EMBED, GATE, MODELS, NORM, RANKS, UP, make_case, make_models

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def sound(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deployed(make_case(tmp_path_factory.mktemp("sound"), directories))


@pytest.fixture
def export(sound: Path, tmp_path: Path) -> Path:
    """A copy that keeps its links among the models."""
    root = tmp_path / sound.name
    root.mkdir()
    placed: dict[int, Path] = {}
    for path in sorted(sound.rglob("*")):
        target = root / path.relative_to(sound)
        if path.is_dir():
            target.mkdir(parents=True)
        elif (inode := path.stat().st_ino) in placed:
            target.hardlink_to(placed[inode])
        else:
            shutil.copy(path, target)
            placed[inode] = target
    assert verify_disk(root, read_manifest(root)).problems == ()
    return root


def flip(path: Path, position: int) -> None:
    """Change one bit in place; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.write(data)


def truncate(path: Path, nbytes: int = 100) -> None:
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size - nbytes)


def swap_tensors(path: Path) -> None:
    """Two tensors of one shape change their bytes: every header stays right."""
    entries = map_file(path)
    a, b = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    changed = entries | {a: Entry(*entries[a][:3], entries[b].raw), b: Entry(*entries[b][:3], entries[a].raw)}
    write_safetensors(path, changed.values())


def without(path: Path, name: str) -> None:
    write_safetensors(path, [e for n, e in map_file(path).items() if n != name])


def renamed(path: Path, old: str, new: str) -> None:
    write_safetensors(path, [e._replace(name=new if n == old else n) for n, e in map_file(path).items()])


def edit_index(path: Path) -> None:
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = "elsewhere.safetensors"
    path.unlink()
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def link_away(path: Path) -> None:
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved.name)


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


PRIVATE = "private.safetensors"
P, S = f"single/{PRIVATE}", "single/{gate}"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "flipped bit in a private shard": (P, lambda p: flip(p, -1), [f"model single, file {PRIVATE}: tensor "]),
    "flipped bit in the copy of a config": (
        "single/config.json",
        lambda p: flip(p, 5),
        ["model single, file config.json: differs from what was exported"],
    ),
    "flipped bit in a header": (P, lambda p: flip(p, 9), [f"model single, file {PRIVATE}: is damaged"]),
    "flipped bit in a shared shard": (
        S,
        lambda p: flip(p, -1),
        [f"model {m}, file {{gate}}: tensor {GATE}: is not the tensor" for m in ("sharded", "single")],
    ),
    "truncated shard": (P, truncate, [f"model single, file {PRIVATE}: is damaged: the header speaks of"]),
    "empty shard": (
        P,
        lambda p: truncate(p, p.stat().st_size),
        [f"model single, file {PRIVATE}: is damaged"],
    ),
    "truncated shared shard": (
        S,
        truncate,
        [f"model {m}, file {{gate}}: is damaged: the header" for m in ("sharded", "single")],
    ),
    "tensors swapped": (
        P,
        swap_tensors,
        [f"model single, file {PRIVATE}: tensor model.layers.{i}.self_attn.q_proj" for i in (0, 1)],
    ),
    "tensor missing": (P, lambda p: without(p, NORM), [f"file {PRIVATE}: tensor {NORM}: is missing"]),
    "tensor renamed": (
        P,
        lambda p: renamed(p, NORM, "model.norm.bias"),
        ["tensor model.norm.bias: does not belong", f"tensor {NORM}: is missing"],
    ),
    "index edited": (f"tied/{INDEX}", edit_index, [f"model tied, file {INDEX}: differs"]),
    "index missing": (f"tied/{INDEX}", Path.unlink, [f"model tied, file {INDEX}: is missing"]),
    "shard missing": (P, Path.unlink, [f"model single, file {PRIVATE}: is missing"]),
    "copy missing": ("tied/notes.txt", Path.unlink, ["model tied, file notes.txt: is missing"]),
    "dangling link": (P, link_to_nothing, [f"model single, file {PRIVATE}: is a link to nothing"]),
    "link": (
        "single/notes.txt",
        link_away,
        ["file single/moved: is no part", "model single, file notes.txt: is a symbolic link"],
    ),
    "directory instead of a file": (
        "single/notes.txt",
        directory_instead,
        ["model single, file notes.txt: is no readable file"],
    ),
    "pipe instead of a file": (
        P,
        lambda p: (p.unlink(), os.mkfifo(p)),
        [f"model single, file {PRIVATE}: is no readable file"],
    ),
    "extra file": ("tied/more.txt", lambda p: p.write_text("?"), ["file tied/more.txt: is no part"]),
    "extra single-file weights": (
        "tied/model.safetensors",
        lambda p: p.write_bytes(b""),
        ["file tied/model.safetensors: is no part of the export"],
    ),
    "extra link to a directory": (
        "tied/more",
        lambda p: p.symlink_to("/"),
        ["file tied/more: is no part of the export"],
    ),
    "manifest with another layout": (
        MANIFEST,
        lambda p: (p.chmod(0o644), p.write_text(json.dumps(json.loads(p.read_text()), indent=1))),
        [f"file {MANIFEST}: is not the manifest of these weights in its canonical form"],
    ),
}


def told(problem: Problem) -> str:
    where = ", ".join(f"{k} {v}" for k in ("model", "file") if (v := getattr(problem, k)))
    return f"{where}: {f'tensor {problem.tensor}: ' if problem.tensor else ''}{problem.message}"


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_is_found_and_named(kind: str, export: Path) -> None:
    where, damage, problems = DAMAGES[kind]
    manifest = read_manifest(export)
    gate = manifest.models["single"].tensors[GATE].file
    damage(export / where.format(gate=gate))
    disk = verify_disk(export, manifest).problems
    found = [told(problem) for problem in disk]
    assert len(found) == len(problems), found
    for problem in problems:
        assert any(problem.format(gate=gate) in f for f in found), (problem, found)
    table, ok = verify(export)
    assert not ok and table["problems"][: len(disk)] == [problem.model_dump() for problem in disk]
    assert all(p["severity"] == "warning" for p in table["problems"][len(disk) :])  # the copy is not where it was


def test_all_damages_are_told_at_once(export: Path) -> None:
    manifest = read_manifest(export)
    for model in MODELS:
        (export / model / "notes.txt").unlink()
        (export / model / PRIVATE).unlink()
    assert len(verify_disk(export, manifest).problems) == 2 * len(MODELS)


@pytest.mark.parametrize(
    ("models", "tensor", "named"),
    [
        (("single",), EMBED, {"single"}),
        (("sharded",), UP, {"sharded"}),  # the first one by name, but the others still hold one file
        (("single", "tied"), UP, {"single", "tied"}),
    ],
)
def test_a_copy_in_the_place_of_a_link_holds_the_right_bytes_and_is_named(
    export: Path, models: tuple[str, ...], tensor: str, named: set[str]
) -> None:
    manifest = read_manifest(export)
    before = verify_disk(export, manifest)
    for model in models:
        path = export / model / manifest.models[model].tensors[tensor].file
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    after = verify_disk(export, manifest)
    lost = manifest.models[models[0]].tensors[tensor]
    assert {p.model for p in after.problems} == named
    assert {(p.code, p.file) for p in after.problems} == {("export-links", lost.file)}
    assert before.shared_bytes - after.shared_bytes == lost.nbytes * len(models)
    assert not verify(export)[1]


# --- manifests that lie -------------------------------------------------------------------------------------


def rewritten(export: Path, change: Callable[[dict[str, object]], object]) -> Path:
    path = export / MANIFEST
    data = json.loads(path.read_text())
    change(data)
    path.unlink()
    path.write_text(json.dumps(data))
    return export


@pytest.mark.parametrize("name", ["/etc/passwd", "../single/config.json", "a/../../b", ".", "", "a//b", "./a"])
@pytest.mark.parametrize("place", ["directory", "files", "tensors"])
def test_a_manifest_that_names_files_elsewhere_is_refused(export: Path, name: str, place: str) -> None:
    def change(data: dict) -> None:  # type: ignore[type-arg]
        model = data["models"]["tied"]
        if place == "directory":
            model["directory"] = name
        elif place == "files":
            model["files"][name] = "0" * 64
        else:
            model["tensors"][NORM]["file"] = name

    with pytest.raises(ProofError, match="names a file elsewhere"):
        read_manifest(rewritten(export, change))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("pool"),
        lambda d: d.update(more=1),
        lambda d: d["models"]["tied"].update(linked="symlink"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(export: Path, change: Callable[[dict[str, object]], object]) -> None:
    with pytest.raises(ProofError, match=r"sandhi.json: no manifest: "):
        read_manifest(rewritten(export, change))


def test_a_manifest_of_another_version_is_refused(export: Path) -> None:
    with pytest.raises(ProofError, match=r"sandhi.json: is of schema version 2, this Sandhi reads 1"):
        read_manifest(rewritten(export, lambda d: d.update(schema_version=2)))


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"{", b"[" * 5000])
def test_a_manifest_that_is_no_json_is_refused(export: Path, data: bytes) -> None:
    (export / MANIFEST).unlink()
    (export / MANIFEST).write_bytes(data)
    with pytest.raises(ProofError, match=r"sandhi.json: no manifest: "):
        read_manifest(export)


# --- killed exports -----------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.exported import MODELS, RANKS, copy_case, make_case

base = Path(sys.argv[1])
case = make_case(base / "case", {name: base / "models" / name for name in MODELS}, RANKS)

def dies_at(count, root):
    "Export under `root` and die by SIGKILL at the count-th flush or rename."
    left = count
    def counted(call):
        def replaced(*arguments, **options):
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return replaced
    os.fsync, os.rename, os.replace = map(counted, (os.fsync, os.rename, os.replace))
    Path(sys.argv[2], str(count)).mkdir(parents=True)
    copy_case(case, root).export()

count = 1
while True:
    pid = os.fork()
    if not pid:
        try:
            dies_at(count, Path(sys.argv[2]) / str(count))
        finally:
            os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
    count += 1
print(count)
"""


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_killed_export_leaves_nothing_half_made_and_the_next_gives_the_same_bytes(tmp_path: Path) -> None:
    directories = make_models(tmp_path / "models")
    (tmp_path / "case").mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    whole = int(done.stdout)  # this run was not killed: the ones before cover every flush and rename
    assert whole > 30
    case = make_case(tmp_path / "reference", directories, RANKS)
    good = contents(case.exported()[0])
    for count in range(1, whole + 1):
        root = tmp_path / "runs" / str(count)
        finished = [p for p in (root / "exports" / "small").iterdir() if not p.name.startswith(".")]
        assert [contents(p) for p in finished] in ([], [good])
        assert finished or count < whole
    for count in (1, whole // 3, whole // 2, whole - 2, whole - 1):
        root = tmp_path / "runs" / str(count)
        again, _ = type(case)(
            root, case.pool, case.checkpoints, case.fingerprints, case.tensors, case.merged, case.adjustments
        ).exported()
        assert contents(again) == good
        assert [p.name for p in again.parent.iterdir()] == [again.name]
