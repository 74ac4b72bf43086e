"""Pool files that people, editors and enemies write: always a Pool or a PoolError that prints."""

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.errors import PoolError
from sandhi_core.pool import Pool, load_pool

VALID = """\
name: p
models:
  - {name: m, path: org/m, tasks: [{task: t, metric: acc, budget: 0.02}]}
"""


def load(data: bytes) -> Pool | PoolError:
    """Whatever else is raised fails the test; so does an error that cannot be printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool.yaml"
        path.write_bytes(data)
        try:
            return load_pool(path)
        except PoolError as error:
            assert "pool.yaml" in str(error).encode().decode()
            assert error.problem.remedy
            return error


def refusal(data: bytes) -> str:
    result = load(data)
    assert isinstance(result, PoolError), result
    return str(result)


def test_the_valid_file_is_valid() -> None:
    assert isinstance(load(VALID.encode()), Pool)
    assert isinstance(load(b"\xef\xbb\xbf" + VALID.encode()), Pool)  # an editor's byte order mark
    assert isinstance(load(VALID.replace("\n", "\r\n").encode()), Pool)


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"", 1, "is empty"),
        (b"# only a comment\n", 1, "is empty"),
        (b"\n\n- a\n- b\n", 3, "holds no mapping"),
        (b"just words", 1, "holds no mapping"),
        (b"name: p\nmodels: [", 2, "flow"),
        (b"name: p\n\tmodels: 1", 2, "cannot start any token"),
        (b"name: p\n---\nname: q\n", 2, "another document"),
        (b"name: p\nmodels: *m\n", 2, "undefined alias"),
        (b"name: p\nmodels: \xff\xfe\n", 2, "is not UTF-8"),
        (b"name: p\nmodels: \x07\n", 2, "U+0007 is not allowed"),
        (b"name: p\n? [a, b]\n: c\n", 2, "a key must be text"),
        (b"name: p\nmodels: &m [*m]\n", 2, "recursive"),
        (b"name: p\nmodels: &m {m: *m}\n", 2, "recursive"),
        (b"name: p\nmodels: !!python/object:os.system {}\n", 2, "could not determine a constructor"),
        (b"name: p\nmodels: !!binary aGk=\n", 2, "could not determine a constructor"),
        (b"name: p\nmodels: !!int [1]\n", 2, "this is no 'tag:yaml.org,2002:int'"),
        (b"name: p\nmodels: !!int x\n", 2, "'x' is no int"),
        (b"name: p\nmodels: !!map x\n", 2, "this is no 'tag:yaml.org,2002:map'"),
        (b"!!seq {a: b}", 1, "this is no 'tag:yaml.org,2002:seq'"),
        (b'name: "\\U7fffffff"', 1, "cannot be read"),
        (b'name: "\\ud800"', 1, "name must"),
        (b"name: p\n<<: {models: 1}\n", 2, "<< is no field"),
        (b"name: p\nmodels: " + b"[" * 5000, 1, "nested too deeply"),
        (b"name: p\nmodels: " + b"9" * 5000, 2, "cannot be read"),
        (b"name: no\nmodels: 2024-01-01\n", 2, "models must"),
    ],
)
def test_what_is_no_pool_is_refused_with_its_line(data: bytes, line: int, message: str) -> None:
    report = refusal(data)
    assert f"pool.yaml:{line}" in report
    assert message in report


@pytest.mark.parametrize("budget", ["1e999", "9" * 4000, "-.inf", "1_0", "0x1", "010", "null", "[]", "1:30"])
def test_numbers_that_are_none(budget: str) -> None:
    assert "models[0].tasks[0].budget must" in refusal(VALID.replace("0.02", budget).encode())


@pytest.mark.parametrize("name", ["a/b", "'a,b'", "...", "../x", "é", "x" * 65, "a.b", '"a\\n"', '""'])
def test_names_that_are_no_slugs(name: str) -> None:
    assert "models[0].name must" in refusal(VALID.replace("name: m,", f"name: {name},").encode())


@pytest.mark.parametrize("path", ['"a\\0b"', '"a\\nb"', '""', "7", "x" * 5000])
def test_paths_that_are_none(path: str) -> None:
    assert "models[0].path must" in refusal(VALID.replace("org/m", path).encode())


def test_a_loop_of_links_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "pool.yaml").write_text(VALID.replace("org/m", "./loop"))
    with pytest.raises(PoolError, match="is no usable path"):
        load_pool(tmp_path / "pool.yaml")


def test_aliases_of_aliases_do_not_explode() -> None:
    levels = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    report = refusal("\n".join([*levels, "name: p", "models: *a39"]).encode())
    assert "a39 is no field" in report
    assert len(report) < 10_000


@pytest.mark.parametrize("name", ["missing.yaml", "folder", "bad\0name", "\udcff.yaml"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(PoolError, match="cannot be read") as caught:
        load_pool(tmp_path / name)
    str(caught.value).encode()


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_pool_or_an_error(text: str) -> None:
    load(text.encode("utf-8", "surrogatepass"))


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_a_pool_or_an_error(data: bytes) -> None:
    load(data)


WORDS = [
    "{",
    "}",
    "[",
    "]",
    ":",
    "-",
    "&a",
    "*a",
    "!!",
    "!!int",
    "|",
    ">",
    "'",
    '"',
    "?",
    "#",
    "null",
    "-.inf",
    "7",
    "---",
    "\\u",
]
SNIPPETS = st.sampled_from(
    [*WORDS, ": ", "- ", "\n", "\t", "\0", "\x85", "\u2028", "%YAML 1.1\n", "<<: *a", "search: {tolerance: "]
) | st.text(max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 6), SNIPPETS), min_size=1, max_size=5))
def test_a_damaged_pool_is_a_pool_or_an_error(edits: list[tuple[int, int, str]]) -> None:
    text = VALID
    for start, cut, insert in edits:
        text = text[:start] + insert + text[start + cut :]
    load(text.encode("utf-8", "surrogatepass"))


FIELD = st.sampled_from(["name", "models", "tasks", "task", "metric", "budget", "path", "search", "tolerance"])
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELD | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    st.dictionaries(FIELD, NESTED, max_size=5),
    st.sampled_from(["models", "search", "evaluation", "profile"]),
    NESTED,
)
def test_any_structure_is_a_pool_or_an_error(fields: dict[str, object], section: str, value: object) -> None:
    load(yaml.safe_dump({**fields, section: value}, allow_unicode=True).encode("utf-8", "surrogatepass"))
