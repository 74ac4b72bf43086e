"""Pool files that people, editors and enemies write: always a Pool or a PoolError that prints."""

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.errors import PoolError
from sandhi_core.pools.pool import Pool, load_pool

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
            assert all(p.remedy and p.file and "\n" not in p.line() for p in error.problems)
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
        (b"name: p\nmodels: [", 2, "the file ends in the middle of a list"),
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


_HEAD = "name: p\nmodels:\n  - name: m\n"


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        ("name: p\n\tmodels: 1", 2, "a tab stands", "use spaces: tabs cannot indent YAML"),
        (f"{_HEAD}  \tpath: x\n", 4, "a tab stands", "use spaces"),
        ("search: {stride: 1,\n\ttolerance: 1}\n", 2, "a tab stands", "use spaces"),
        ("name:mine\nmodels:\n  - name: m\n", 1, "no colon with a space", "write `field: value`"),
        ("name\n\n# of the pool\nmodels: []\n", 1, "no colon with a space", "write `field: value`"),
        (f"{_HEAD}    path:./x\n    tasks: []\n", 4, "no colon with a space", "write `field: value`"),
        ("name: p\nmodels:\n  - name:m\n    path: x\n", 3, "no colon with a space", "write `field: value`"),
        ("name: p\nmodels:\n  -name: m\n    path: x\n", 3, "no space follows the dash", "write `- item`"),
        ("name: p\nmodels:\n  -{name: m, path: x}\n", 3, "no space follows the dash", "write `- item`"),
        ("name: p: q\n", 1, "a second colon", "put quotes around"),
        (f"{_HEAD}      path: x\n", 4, "is indented as part of the line before", "the same number of spaces"),
        (f"{_HEAD}   path: x\n", 4, "is indented differently", "the same number of spaces"),
        ("  name: p\nmodels: []\n", 2, "is indented differently", "the same number of spaces"),
        (
            f"{_HEAD}    tasks:\n      - {{task: t\n  - name: n\n",
            5,
            "the '{' that opens here is not closed",
            "with '}'",
        ),
        ("search: {stride: 1\nname: p\n", 1, "a comma is missing on this line or line 2", "with '}'"),
        ("profile: {seeds: [1, 2}\n", 1, "the '[' that opens here is not closed", "with ']'"),
        ("search: {stride: 1 accept: original}\n", 1, "a comma is missing on this line", "put a comma between"),
        ("search: {stride: 1}}\n", 1, "a '}' too many", "remove it"),
        ("name: 'p\nmodels: []\n", 1, "the quotation mark that opens here is never closed", "close it"),
        ("name: 'p' q\n", 1, "text follows a value that is complete", "put quotes around the whole"),
        ("name: @p\n", 1, "a value cannot begin with '@'", "put quotes around"),
        ("name: *p\n", 1, "undefined alias", "begins with *"),
        ('name: "C:\\models"\n', 1, "unknown escape character", "single quotes"),
        ("name: |p\n", 1, "chomping", "put quotes around"),
        ("name: p\n---\nname: q\n", 2, "another document begins here", "one pool in a file"),
    ],
)
def test_what_is_no_yaml_is_told_where_it_is_to_be_mended(text: str, line: int, message: str, remedy: str) -> None:
    result = load(text.encode())
    assert isinstance(result, PoolError), result
    (problem,) = result.problems
    assert problem.file is not None and problem.file.endswith(f"pool.yaml:{line}")
    assert message in problem.message and remedy in problem.remedy


@pytest.mark.parametrize("budget", ["1e999", "9" * 4000, "-.inf", "1_0", "0x1", "010", "null", "[]", "1:30"])
def test_numbers_that_are_none(budget: str) -> None:
    report = refusal(VALID.replace("0.02", budget).encode())
    assert "models[0].tasks[0].budget must" in report or (budget == "null" and "budget is empty" in report)


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
