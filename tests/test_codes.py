"""One place defines the codes of problems: docs/problems.md is printed from it, the code uses these and no others."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from sandhi_core.codes import CODES, document, rank
from sandhi_core.errors import Problem, SandhiError, ServingError

ROOT = Path(__file__).parent.parent
ALL = [code for section in CODES.values() for code in section]
SOURCES = [f for layer in ("sandhi_core", "resources", "assets", "pipelines") for f in (ROOT / layer).rglob("*.py")]
TAKES_FIRST = {"report", "_problem", "_warning", "_wrong", "_error"}  # functions whose first argument is a code


def test_the_document_is_the_registry_printed() -> None:
    assert (ROOT / "docs" / "problems.md").read_text() == document()
    done = subprocess.run([sys.executable, "-m", "sandhi_core.codes"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, document())


def test_every_code_stands_in_the_document_once_with_meaning_and_remedy() -> None:
    assert len(ALL) == len(set(ALL))
    rows = [line.split(" | ") for line in document().splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == ALL
    assert all(len(row) == 4 and row[2].endswith(".") and row[3].removesuffix(" |").endswith(".") for row in rows)
    assert sorted(ALL, key=rank) == ALL


def texts(file: Path) -> Iterator[ast.Constant]:
    return (
        n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )


def given_as_codes(file: Path) -> Iterator[str]:
    """Literals that stand where a code does."""
    for node in ast.walk(ast.parse(file.read_text())):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found += [k.value for k in node.keywords if k.arg == "code"]
            found += node.args[:1] if name in TAKES_FIRST else []
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "code" for t in node.targets):
            found.append(node.value)
        for value in found:
            branches = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            yield from (b.value for b in branches if isinstance(b, ast.Constant) and isinstance(b.value, str))


def test_what_the_source_gives_as_a_code_is_registered() -> None:
    found = {(f.name, code) for f in SOURCES for code in given_as_codes(f)}
    spoken = {
        (f, c) for f, c in found if " " not in c and "{" not in c
    }  # other functions' first arguments are messages
    assert {pair for pair in spoken if pair[1] not in ALL} == set()
    assert len({code for _, code in spoken}) > 60


def test_every_registered_code_is_used() -> None:
    used = {text.value for f in SOURCES if f.name != "codes.py" for text in texts(f)}
    assert set(ALL) - used == set()


def test_errors_have_registered_codes_of_their_own() -> None:
    def below(kind: type[SandhiError]) -> Iterator[type[SandhiError]]:
        for sub in kind.__subclasses__():
            yield sub
            yield from below(sub)

    named = {kind.code for kind in below(SandhiError) if "code" in vars(kind)}
    assert named and named <= set(ALL)


def test_no_problem_has_another_code_or_severity() -> None:
    with pytest.raises(ValidationError, match="'made-up' is no code"):
        Problem(code="made-up", severity="error", message="m", remedy="r")
    with pytest.raises(ValidationError, match="not-finite is no warning"):
        Problem(code="not-finite", severity="warning", message="m", remedy="r")
    with pytest.raises(ValidationError, match="is no code"):
        ServingError("m", remedy="r", code="made-up")
    for severity in ("error", "warning"):
        said = {"code": "disk-space", "severity": severity, "message": "m", "remedy": "r"}
        assert json.loads(Problem.model_validate(said).model_dump_json())["severity"] == severity
