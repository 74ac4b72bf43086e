"""Owner and engines as processes: what is shared, what is refused, who notices whose end."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event

import pytest
import torch

from sandhi_core.errors import CheckpointError, ProofError, ServingError
from sandhi_core.layout import MANIFEST, read_manifest
from sandhi_core.serving.cuda import holding, protocol
from sandhi_core.serving.cuda.client import attach
from sandhi_core.serving.cuda.driver import READ_WRITE
from sandhi_core.serving.cuda.memory import Device, DeviceMapping
from sandhi_core.serving.cuda.owner import address, main
from sandhi_core.serving.cuda.protocol import Ask, Given
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.slices import Slices
from tests.exported import DOWN, GATE, MODELS, UP
from tests.serving.cuda.fake import GRANULARITY, Fake, driver
from tests.serving.cuda.owners import Owner, attached, engine, owning, until


def asked(root: Path, path: Path, model: str = "single") -> tuple[Given, int, socket.socket]:
    """The owner's answer as it comes over the socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    device = Device(driver(), 0).uuid
    protocol.send_ask(connection, Ask(manifest=read_manifest(root).digest, model=model, device=device, size=1, rank=0))
    given, descriptor = protocol.receive_answer(connection)
    return given, descriptor, connection


def writable(descriptor: int, nbytes: int) -> DeviceMapping:
    """The owner's memory as no engine maps it."""
    memory = Device(driver(), 0).imported(descriptor, nbytes)
    os.close(descriptor)
    return memory.map(READ_WRITE)


# --- what is shared -----------------------------------------------------------------------------------------


def test_the_line_of_a_ready_owner(owner: Owner, root: Path) -> None:
    manifest = read_manifest(root)
    shared = {
        t.digest: t.nbytes for m in manifest.models.values() for t in m.tensors.values() if t.sharing != "private"
    }
    assert owner.ready == {
        "socket": str(owner.socket),
        "pid": owner.process.pid,
        "manifest": manifest.digest,
        "device": Device(driver(), 0).uuid,
        "size": 1,
        "rank": 0,
        "tensors": len(shared),
        "bytes": sum(shared.values()),
        "reserved": GRANULARITY,
    }
    assert stat.S_IMODE(owner.socket.stat().st_mode) == 0o600


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("check", ["full", "sampled", "off"])
def test_an_engine_has_the_exports_tensors(owner: Owner, root: Path, model: str, check: str) -> None:
    mapped = MappedModel.open(root / model)
    held = attached(root, owner.socket, model, check=check)
    assert held.alive and held.tensors.keys() == mapped.shared()
    for name in mapped.shared():
        assert torch.equal(held.tensor(name), mapped.tensor(name))
        assert held.tensor(name).data_ptr() % 256 == 0
    with pytest.raises(ServingError, match=f"not-held: model {model} tensor {DOWN}: is not shared"):
        held.tensor(DOWN)
    kept = held.tensor(UP)
    held.close()
    assert torch.equal(kept, mapped.tensor(UP)) and not held.alive
    with pytest.raises(ServingError, match="attach again"):
        held.tensor(UP)


def test_two_engines_have_the_same_physical_bytes(owner: Owner, root: Path) -> None:
    def work(pipe: Connection) -> None:
        held = attached(root, owner.socket, "single")
        first = held.tensor(UP).view(torch.uint8).flatten()[:1]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:device" in line]
        # What the test itself maps for writing came along by the fork.
        pipe.send([(device, inode) for _, access, _, device, inode, *_ in maps if access == "r--s"])
        while pipe.recv():
            pipe.send(first.item())

    given, descriptor, connection = asked(root, owner.socket)
    everything, at = writable(descriptor, given.nbytes).bytes(), given.tensors[UP].offset
    before = everything[at].item()
    with engine(work) as (_, one), engine(work) as (_, other), connection:
        places = one.recv()
        assert places == other.recv() and len(places) == 1
        for byte in (before ^ 255, before):
            everything[at] = byte
            for pipe in (one, other):
                pipe.send(True)
                assert pipe.recv() == byte


def test_an_engine_that_writes_is_ended(owner: Owner, root: Path) -> None:
    def work(pipe: Connection) -> None:
        attached(root, owner.socket, "single").tensor(UP).fill_(0)

    with engine(work) as (process, _):
        process.join(60)
        assert process.exitcode == -signal.SIGSEGV
    attached(root, owner.socket, "single", check="full").close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_slices(root: Path, tmp_path: Path, rank: int) -> None:
    with owning(root, tmp_path / "s", "--tensor-parallel", "2", "--rank", str(rank)) as owner:
        assert owner.ready["rank"] == rank
        for model in MODELS:
            mapped = MappedModel.open(root / model)
            slices = Slices(model, mapped.config(), 2, rank)
            held = attached(root, owner.socket, model, size=2, rank=rank, check="full")
            for name in mapped.shared():
                assert torch.equal(held.tensor(name), slices.of(name).of(mapped.tensor(name)))
            assert held.tensors[UP].part != held.tensors[UP].digest == mapped.tensors[UP].digest
            held.close()
        assert held.tensors[UP].shape[0] * 2 == mapped.tensors[UP].shape[0]


def test_engines_that_come_and_go_leave_nothing(owner: Owner, root: Path) -> None:
    def held() -> tuple[int, int]:
        process = Path("/proc") / str(owner.process.pid)
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    until(lambda: owner.said.endswith("attached now: 0\n") or not owner.said, "earlier engines gone")
    before = until(held, "counts")
    for _ in range(30):
        attached(root, owner.socket, "single").close()
    until(lambda: held() <= before, "as many descriptors and threads as before")


# --- who notices whose end ----------------------------------------------------------------------------------


def test_a_killed_owner_is_noticed_and_replaced(root: Path, tmp_path: Path) -> None:
    died, path = Event(), tmp_path / "s"
    with owning(root, path) as owner:
        assert owner.ready
        held = attached(root, path, "single", died=died.set)
        assert held.alive and not died.is_set()
        assert owner.signal(signal.SIGKILL) == -signal.SIGKILL
    assert died.wait(60) and not held.alive
    assert torch.equal(held.tensor(GATE), MappedModel.open(root / "single").tensor(GATE))  # still mapped
    held.check("full")
    with pytest.raises(ServingError, match=f"owner-absent: file {path}: no owner answers there: Connection refused"):
        attached(root, path, "single")
    assert path.exists()
    with owning(root, path) as owner:
        assert owner.ready
        attached(root, path, "single").close()
    held.close()


def test_an_end_in_the_callback(root: Path, tmp_path: Path) -> None:
    """An engine that leaves because the owner is gone, in the thread that says so."""
    done = Event()
    with owning(root, tmp_path / "s") as owner:
        assert owner.ready
        held = attached(root, owner.socket, "single", died=lambda: (held.close(), done.set()))
        owner.signal(signal.SIGKILL)
    assert done.wait(60)


def test_closing_is_no_death(owner: Owner, root: Path) -> None:
    died = Event()
    held = attached(root, owner.socket, "single", died=died.set)
    held.close()
    held.close()
    assert not died.is_set() and not held.alive


def test_a_killed_engine_is_noticed(root: Path, tmp_path: Path) -> None:
    def work(pipe: Connection) -> None:
        held = attached(root, tmp_path / "s", "tied")
        pipe.send(held.alive)
        pipe.recv()

    with owning(root, tmp_path / "s") as owner:
        assert owner.ready
        with engine(work) as (process, pipe):
            assert pipe.recv()
            who = f"process {process.pid} with model tied"
            until(lambda: f"{who} attached; attached now: 1" in owner.said, "attaching noted")
            process.kill()
            until(lambda: f"{who} left; attached now: 0" in owner.said, "leaving noted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_owner_ends_cleanly(root: Path, tmp_path: Path, number: int) -> None:
    with owning(root, tmp_path / "s") as owner:
        assert owner.ready
        held = attached(root, owner.socket, "single")
        assert owner.signal(number) == 0
        assert "left: 0 handles, 0 mappings" in owner.said
        until(lambda: not held.alive, "the engine notices")
        held.close()
    assert not owner.socket.exists() and not list(tmp_path.glob("*.lock"))


def test_an_owner_is_stopped_while_it_prepares(root: Path, tmp_path: Path) -> None:
    def slowly() -> None:
        def digest(*_: object) -> str:
            print("reading", file=sys.stderr, flush=True)
            time.sleep(120)
            return ""

        holding.tensor_digest = digest  # type: ignore[assignment]

    with owning(root, tmp_path / "s", before=slowly) as owner:
        until(lambda: "reading" in owner.said, "reading")
        with pytest.raises(ServingError, match="no owner answers there: Connection refused"):
            attached(root, owner.socket, "single")
        assert owner.signal(signal.SIGTERM) == 130
        assert "left: 0 handles, 0 mappings" in owner.said
    assert not list(tmp_path.glob("s")) and not list(tmp_path.glob("*.lock"))


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"manifest": "0" * 64}, "manifest-differs: model single: the owner was started for manifest [0-9a-f]{64}, "),
        ({"device": 1}, "device-differs: .* for device 00010203.*, the engine asks for 10111213"),
        ({"size": 2}, "ranks-differ: .* for tensor-parallel size 1, the engine asks for 2"),
        ({"rank": 1}, "rank-differs: .* for rank 0, the engine asks for 1"),
    ],
)
def test_another_export_device_or_rank(owner: Owner, root: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ServingError, match=said):
        attached(root, owner.socket, "single", **options)


def test_another_model(owner: Owner, root: Path) -> None:
    manifest = read_manifest(root).digest
    with pytest.raises(ServingError, match=r"model-unknown: the owner's export has no model x .ask for one of sharded"):
        attach(owner.socket, manifest, "x", {}, driver=driver())


def test_other_digests(owner: Owner, root: Path) -> None:
    mapped = MappedModel.open(root / "single")
    digests = {name: mapped.tensors[name].digest for name in mapped.shared()}
    for wrong, said in (
        ({**digests, UP: "0" * 64}, f"with digest {digests[UP]}, {'0' * 64} is expected"),
        ({**digests, "more": "0" * 64}, f"with digest None, {'0' * 64} is expected"),
        ({n: d for n, d in digests.items() if n != UP}, f"with digest {digests[UP]}, None is expected"),
    ):
        with pytest.raises(ProofError, match=f"model single tensor .*: the owner holds it {said}"):
            attached(root, owner.socket, "single", digests=wrong)


def test_memory_that_was_written_to(root: Path, tmp_path: Path) -> None:
    with owning(root, tmp_path / "s") as owner:
        assert owner.ready
        given, descriptor, connection = asked(root, owner.socket)
        writable(descriptor, given.nbytes).bytes()[given.tensors[UP].offset] += 1
        expected = given.tensors[UP].part
        with pytest.raises(ProofError, match=f"model single tensor {UP}: .* there is [0-9a-f]{{64}}, {expected} is"):
            attached(root, owner.socket, "single", check="full")
        attached(root, owner.socket, "single", check="off").close()
        connection.close()


def test_one_owner_a_socket(owner: Owner, root: Path) -> None:
    with owning(root, owner.socket) as second:
        assert second.ended() == 1
        assert f"owner-exists: file {owner.socket}: another owner is there" in second.said
    attached(root, owner.socket, "single").close()


def test_sockets_that_cannot_be(tmp_path: Path) -> None:
    long = tmp_path / ("s" * 108)
    with pytest.raises(ServingError, match=r"the socket's path has \d+ bytes, at most 107"), address(long):
        pass
    with pytest.raises(ServingError, match=r"the socket's path has \d+ bytes"):
        attach(long, "", "", {}, driver=driver())
    missing = tmp_path / "no" / "s"
    with pytest.raises(ServingError, match=r"its lock s\.lock cannot be made: No such file"), address(missing):
        pass
    taken = tmp_path / "file"
    taken.write_text("mine")
    with pytest.raises(ServingError, match="something that is no socket is there"), address(taken):
        pass
    assert taken.read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ServingError, match="no owner answers there: No such file"):
        attach(tmp_path / "s", "", "", {}, driver=driver())


def test_a_device_that_is_full(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake = Fake(total=GRANULARITY - 1)
    assert main([str(root), "--socket", str(tmp_path / "s")], driver(fake)) == 1
    error = capfd.readouterr().err
    assert f"device-full: device 0 has {GRANULARITY - 1} bytes free, the shared tensors take {GRANULARITY}" in error
    assert not fake.handles and not list(tmp_path.iterdir())


def test_a_damaged_file(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "export"))
    tensor = read_manifest(copy).models["tied"].tensors[UP]
    for model in MODELS:
        file = copy / model / read_manifest(copy).models[model].tensors[UP].file
        file.chmod(0o644)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    fake = Fake()
    assert main([str(copy), "--socket", str(tmp_path / "s")], driver(fake)) == 1
    error = capfd.readouterr().err
    assert f"tensor {UP}: is not what was exported: its digest is " in error
    assert f"{tensor.digest} is expected" in error
    assert not fake.handles and not fake.mapped and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tensor-parallel", "3"], "ranks-unaligned: model sharded: its 4 attention heads cannot be divided among 3"),
        (["--tensor-parallel", "2", "--rank", "2"], "rank-invalid: model sharded: there is no rank 2 among 2"),
        (["--device", "7"], "device-invalid: there is no device 7: this process sees 2"),
    ],
)
def test_ranks_and_devices_that_cannot_be(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([str(root), "--socket", str(tmp_path / "s"), *arguments], driver()) == 1
    assert said in capfd.readouterr().err


def test_exports_with_nothing_to_hold(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="cannot be read: No such file"):
        holding.Wanted.of(tmp_path, 1, 0)
    copy = Path(shutil.copytree(root, tmp_path / "export"))
    text = (copy / MANIFEST).read_text().replace('"merged"', '"private"').replace('"duplicate"', '"private"')
    (copy / MANIFEST).unlink()
    (copy / MANIFEST).write_text(text)
    with pytest.raises(ServingError, match=f"nothing-shared: file {copy}: its models share no matrix"):
        holding.Wanted.of(copy, 1, 0)
    (copy / "tied" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model tied file .*config\.json: is missing"):
        holding.Wanted.of(copy, 1, 0)


def test_owners_that_make_no_sense(root: Path, tmp_path: Path) -> None:
    def serve(pipe: Connection) -> None:
        with address(tmp_path / "s") as listener:
            listener.listen()
            pipe.send(True)
            for line in (b"", b"hello\n", b'{"kind": "given", "protocol": 2}\n'):
                connection, _ = listener.accept()
                protocol.receive_ask(connection)
                connection.sendall(line)
                connection.close()

    with engine(serve) as (_, pipe):
        assert pipe.recv()
        for said in (
            "owner-absent: .*the owner there does not answer",
            "protocol-garbled",
            "protocol-differs: the other end speaks version 2 of the owner's protocol, this one version 1",
        ):
            with pytest.raises(ServingError, match=said):
                attached(root, tmp_path / "s", "single")


def test_engines_that_make_no_sense_do_not_disturb(owner: Owner, root: Path) -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(owner.socket))
    for line, code in (
        (b"GET / HTTP/1.1\n", "protocol-garbled"),
        (b"[]\n", "protocol-garbled"),
        (b'{"protocol": 0}\n', "protocol-differs"),
        (b'{"protocol": 1}\n', "protocol-garbled"),
        (b"x" * (1 << 17) + b"\n", "protocol-garbled"),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(owner.socket))
            connection.settimeout(60)
            connection.sendall(line)
            with pytest.raises(ServingError, match=code):
                protocol.receive_answer(connection)
    attached(root, owner.socket, "single").close()
    silent.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user than this one: only root can become one")
def test_another_user_is_refused_by_either_side(owner: Owner, root: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    def ask(pipe: Connection) -> None:
        os.chdir(owner.socket.parent)  # what lies above it, nobody else may pass
        os.setuid(65534)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(owner.socket.name)
        try:
            protocol.receive_answer(connection)
        except ServingError as error:
            pipe.send(str(error))

    def own(pipe: Connection) -> None:
        os.chdir(tmp_path)
        os.setuid(65534)
        with address(Path("s")) as listener:
            listener.listen()
            pipe.send(True)
            listener.accept()
            pipe.recv()

    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (owner.socket, owner.socket.parent)}
    for path in modes:
        path.chmod(0o777)
    with engine(ask) as (_, pipe):
        assert "user-differs: the engine belongs to user 65534, this process to user 0" in pipe.recv()
    for path, mode in modes.items():
        path.chmod(mode)
    with engine(own) as (_, pipe):
        assert pipe.recv()
        with pytest.raises(ServingError, match="user-differs: the owner belongs to user 65534"):
            attached(root, tmp_path / "s", "single")


def test_the_command_where_there_is_no_gpu(root: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    command = [sys.executable, "-m", "sandhi_core.serving.cuda.owner", str(root), "--socket", str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cuda-missing: file libcuda.so.1: there is no CUDA driver here" in done.stderr
    assert not list(tmp_path.iterdir())
