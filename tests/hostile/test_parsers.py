"""Whatever bytes lie where Sandhi reads a file: a value, or one of its own errors that prints; in bounded room."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandhi_core.artifacts import Artifacts
from sandhi_core.checkpoints.safetensors_file import DTYPES, FormatError, read_header
from sandhi_core.checkpoints.survey import survey
from sandhi_core.errors import PoolError, ProofError, SandhiError, StoreError
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.layout import MANIFEST, read_manifest
from sandhi_core.pools.pool import load_pool
from sandhi_core.records import ExportedModel, ExportedTensor, Manifest
from tests.synthetic import evaluation, fingerprint

FEW = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
ODD = st.sampled_from(
    [
        *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"\x00", b"\xff", b"\n", b"null", b"true", b"-1", b"1e999"),
        *(b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5_000, b"NaN", b"Infinity", b'"\\ud800"', b'"\\udfff\\ud800"'),
        *(b"18446744073709551616", b"0.5", b'"../../x"', b"&a [*a]", b"!!python/object:os.system x", b"*a", b"? "),
    ]
)


def spoiled(whole: bytes) -> st.SearchStrategy[bytes]:
    """What is whole with pieces taken out, put in twice or replaced by odd ones; or nothing like it."""

    def splice(cuts: list[tuple[float, float, bytes]]) -> bytes:
        found = whole
        for at, width, odd in cuts:
            start = int(at * len(found))
            found = found[:start] + odd + found[start + int(width * (len(found) - start) ** 0.5) :]
        return found

    place = st.floats(0, 1, exclude_max=True)
    cut = st.tuples(place, place, ODD | st.binary(max_size=8) | st.just(b""))
    return st.lists(cut, max_size=4).map(splice) | st.binary(max_size=64) | ODD


def prints(error: Exception) -> None:
    """To any terminal and any log."""
    assert str(error).encode()
    if isinstance(error, SandhiError):
        assert all(p.message and p.remedy and p.model_dump_json() for p in error.problems)


# --- safetensors headers ------------------------------------------------------------------------------------

HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    }
).encode()


def header(text: bytes, data: int = 26, length: int | None = None) -> dict[str, object] | FormatError:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
        try:
            return dict(read_header(path))
        except FormatError as error:
            prints(error)
            return error


def test_the_header_that_is_spoiled_below_is_sound() -> None:
    assert isinstance(header(HEADER), dict)


@FEW
@given(spoiled(HEADER), st.integers(0, 64), st.none() | st.integers(0, 2**64 - 1))
@example(b"9" * 5000, 0, None)
@example(b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,1]}}', 1, None)
@example(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, None)
@example(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", 0, None)
@example(b'{"a":{"dtype":"U8","shape":[' + b"2," * 200_000 + b'0],"data_offsets":[0,0]}}', 0, None)
def test_any_header_is_read_or_refused(text: bytes, data: int, length: int | None) -> None:
    found = header(text, data, length)
    if isinstance(found, dict):
        assert all(place.end <= 8 + len(text) + data and place.dtype in DTYPES for place in found.values())  # type: ignore[attr-defined]


# --- what lies in a checkpoint ------------------------------------------------------------------------------

INDEX = json.dumps({"metadata": {"total_size": 4}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}).encode()


@FEW
@given(spoiled(INDEX), spoiled(b'{"model_type": "llama", "hidden_size": 4, "name": "\\u00e9"}'))
@example(b'{"weight_map": {"\\ud800": "x.safetensors"}}', b"{}")
@example(b'{"weight_map": {"a": "\\ud800.safetensors"}}', b"{}")
@example(INDEX, b'{"a": "\\udead"}')
@example(INDEX, b'{"a": ' + b"9" * 5000 + b"}")
def test_any_index_and_configuration_are_read_or_reported(index: bytes, config: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "model.safetensors.index.json").write_bytes(index)
        (directory / "config.json").write_bytes(config)
        found = survey(directory, "m")
        assert not found.complete
        for problem in found.problems:
            assert problem.line().encode()
            assert problem.model_dump_json()


# --- pool files, records, manifests, score logs -------------------------------------------------------------

POOL = b"""\
name: p
models:
  - {name: m, path: org/m, tasks: [{task: t, metric: acc, budget: 0.02}]}
evaluation: {splits: {profile: 0.3, search: 0.3, holdout: 0.4}, seed: 42}
deploy: {device_memory: 80GiB}
"""


@FEW
@given(spoiled(POOL))
def test_any_pool_file_is_read_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool.yaml"
        path.write_bytes(text)
        try:
            load_pool(path)
        except PoolError as error:
            prints(error)


def laughs(levels: int = 9) -> str:
    """Each line ten times the one before: a billion of the first, if anyone writes them out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "rest",
    [
        "name: p\nmodels: *a9\n",
        "name: *a9\nmodels: []\n",
        "name: p\nmodels: [{name: m, path: *a9, tasks: *a9}]\nevaluation: {splits: *a9, seed: *a9}\n",
        "name: p\nmodels: *a9\nmerging: {methods: *a9, bases: *a9}\nprofile: {seeds: *a9}\n",
    ],
)
def test_aliases_of_aliases_are_never_written_out(tmp_path: Path, rest: str) -> None:
    (tmp_path / "pool.yaml").write_text(laughs() + rest)
    with pytest.raises(PoolError) as refused:
        load_pool(tmp_path / "pool.yaml")
    assert len(str(refused.value)) < 10_000


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{n}: 1\n" for n in range(3_000)),
        "name: p\n" * 3_000,
        "t: &t {name: m, path: org/m}\nname: p\nmodels: [" + ",".join(["*t"] * 3_000) + "]",
    ],
    ids=["fields", "repeated", "models"],
)
def test_of_very_many_mistakes_the_first_are_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "pool.yaml").write_text(text)
    with pytest.raises(PoolError) as refused:
        load_pool(tmp_path / "pool.yaml")
    assert len(refused.value.problems) == 201
    assert "more mistakes follow" in refused.value.problems[-1].message


def test_a_pool_file_too_large_to_be_one_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "pool.yaml").open("wb") as f:
        f.write(POOL)
        f.truncate(1 << 40)  # a hole: reading all of it would fill memory
    with pytest.raises(PoolError, match=r"pool\.yaml:1: has more than 1 MiB"):
        load_pool(tmp_path / "pool.yaml")


TENSOR = ExportedTensor(
    digest="0" * 64, dtype="BF16", shape=(1,), nbytes=2, file="private.safetensors", sharing="private"
)
EXPORTED = ExportedModel(
    directory="m", weights="w", files={"config.json": "0" * 64}, tensors={"t": TENSOR}, linked="hardlink"
)


@FEW
@given(spoiled(Manifest(pool="p", point="deployed", models={"m": EXPORTED}).canonical()))
@example(b'{"models":{},"point":"\\ud800","pool":"p","schema_version":1}')
def test_any_manifest_is_read_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_bytes(text)
        try:
            assert read_manifest(Path(folder)).canonical()
        except ProofError as error:
            prints(error)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifacts, Path]:
    artifacts = Artifacts(tmp_path_factory.mktemp("root"))
    artifacts.save(("checkpoint", "m"), "f", {"a": [1, None]}, fingerprint("m", 1))
    return artifacts, artifacts.root / "records" / "checkpoint" / "m.json"


def test_any_record_is_what_was_written_or_none(stored: tuple[Artifacts, Path]) -> None:
    artifacts, path = stored
    whole = path.read_bytes()
    first = artifacts.envelope(("checkpoint", "m"))
    assert first is not None

    @FEW
    @given(spoiled(whole))
    def holds(text: bytes) -> None:
        path.unlink()
        path.write_bytes(text)
        found = artifacts.envelope(("checkpoint", "m"))
        assert found is None or found.record == first.record

    holds()


def scores() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        for value in (0.25, 0.5):
            ScoreLog(path).add(evaluation({"t": value}, questions=2).model_copy(update={"weights": f"w{value}"}))
        return path.read_bytes()


def read_scores(text: bytes) -> Callable[[str], object]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_bytes(text)
        log = ScoreLog(path)
        return lambda weights: log.get(weights, "")


@FEW
@given(spoiled(scores()))
def test_any_score_log_is_read_or_refused(text: bytes) -> None:
    try:
        read_scores(text)
    except StoreError as error:
        prints(error)


def test_the_score_log_that_is_spoiled_above_is_sound() -> None:
    assert read_scores(scores())
