"""The score log: what was added is there for ever, whatever was killed when."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.errors import StoreError
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.records import Evaluation, TaskResult


def scored(weights: str, value: float = 0.5) -> Evaluation:
    result = TaskResult(value=value, higher_is_better=True, questions=(value, 1.0))
    return Evaluation(weights=weights, context="c", split="search", tasks={"t": result})


def test_found_again_by_another_log(tmp_path: Path) -> None:
    ScoreLog(tmp_path / "log").add(scored("a"))
    log = ScoreLog(tmp_path / "log")
    assert log.get("a", "c") == scored("a")
    assert log.get("a", "other context") is None
    assert log.get("b", "c") is None


def test_two_open_logs_see_each_others_scores(tmp_path: Path) -> None:
    first, second = ScoreLog(tmp_path / "log"), ScoreLog(tmp_path / "log")
    first.add(scored("a"))
    assert second.get("a", "c") == scored("a")
    second.add(scored("b"))
    assert first.get("b", "c") == scored("b")


@given(cut=st.integers(1, 400))
def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    log = ScoreLog(path)
    log.add(scored("a"))
    whole = path.read_bytes()
    log.add(scored("b"))
    both = path.read_bytes()
    last = len(path.read_bytes()) - len(whole)
    path.write_bytes(path.read_bytes()[: len(whole) + min(cut, last - 1)])
    reopened = ScoreLog(path)
    assert reopened.get("a", "c") == scored("a")
    assert reopened.get("b", "c") is None
    reopened.add(scored("b"))
    assert path.read_bytes() == both


def test_a_log_that_cannot_be_read_is_named_and_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(StoreError, match="cannot be read: Is a directory") as refused:
        ScoreLog(tmp_path / "log")
    assert refused.value.problem.file == str(tmp_path / "log")


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ScoreLog(path)
    log.add(scored("a"))
    log.add(scored("b"))
    path.write_bytes(b"#" + path.read_bytes()[1:])
    with pytest.raises(StoreError, match="not an evaluation"):
        ScoreLog(path)


def test_no_flipped_bit_is_another_score(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ScoreLog(path).add(scored("a"))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found = ScoreLog(path).get("a", "c")
        except StoreError:
            continue
        assert found in (None, scored("a")), at


def test_scores_of_before_lines_were_sealed_are_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(scored("a").canonical() + b"\n")
    assert ScoreLog(path).get("a", "c") == scored("a")


def test_many_processes_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import sys; from pathlib import Path; from tests.evaluation.test_scorelog import scored;"
        "from sandhi_core.evaluation.scorelog import ScoreLog; log = ScoreLog(Path(sys.argv[1]));"
        "[log.add(scored(f'{sys.argv[2]} {i}')) for i in range(30)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    log = ScoreLog(path)
    assert all(log.get(f"{n} {i}", "c") for n in range(3) for i in range(30))
    assert len(path.read_bytes().splitlines()) == 90
