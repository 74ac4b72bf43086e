"""The list of public failures is complete: each has tests, and these tests are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import CHECKOUT, artifact
from tests.hostile.failures import FAILURES
from tests.hostile.reported import REPORTED
from tests.hostile.test_accepted import ACCEPTED


@pytest.mark.slow
def test_every_test_of_the_table_is_collected() -> None:
    named = sorted({test for tests in FAILURES.values() for test in tests})
    files = sorted({f"tests/{test.partition('::')[0]}" for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    collected = {line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}
    collected |= {line.partition("[")[0] for line in collected}
    assert [test for test in named if test not in collected] == []


def test_every_case_with_a_number_is_in_the_table() -> None:
    cases = [*REPORTED, *(case for case, _ in ACCEPTED.values() if case[0].isdigit())]
    listed = [test for tests in FAILURES.values() for test in tests]
    assert [case for case in cases if not any(f"[{case}" in test for test in listed)] == []
    assert all(int(case.partition(" ")[0]) in FAILURES for case in cases)


def list_of_failures() -> Path:
    """The list, which is no part of this repository: it lies beside the recordings."""
    return artifact().parent / "failures.md"


def test_the_table_has_the_numbers_of_the_list() -> None:
    if not list_of_failures().is_file():
        pytest.skip(f"no list at {list_of_failures()} (beside SANDHI_ARTIFACT)")
    numbers = re.findall(r"^(\d+)\. ", list_of_failures().read_text(), re.MULTILINE)
    assert sorted(map(int, numbers)) == sorted(FAILURES)
