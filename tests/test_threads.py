import threading
import time
from collections.abc import Iterator

import pytest
import torch

from sandhi_core.threads import each_on_a_thread


@pytest.fixture(autouse=True)
def four() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_whoever_is_done_first() -> None:
    meeting = threading.Barrier(4, timeout=60)  # passes only where four are at work at once

    def work(at: int) -> int:
        meeting.wait()
        time.sleep((3 - at % 4) / 100)
        return at

    assert list(each_on_a_thread(work, range(8))) == list(range(8))


def test_the_first_error_is_raised_and_what_has_not_begun_is_left_out() -> None:
    begun: list[int] = []

    def work(at: int) -> None:
        begun.append(at)
        if at == 1:
            raise ValueError("one")
        time.sleep(0.05)

    with pytest.raises(ValueError, match="one"):
        list(each_on_a_thread(work, range(1000)))
    assert len(begun) < 100 and threading.active_count() < 50


def test_each_calculates_alone_and_later_threads_as_before() -> None:
    assert set(each_on_a_thread(lambda at: torch.get_num_threads(), range(8))) == {1}
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *later] == [4, 4]


def test_of_work_that_writes_twice_as_much_is_under_way() -> None:
    meeting = threading.Barrier(8, timeout=60)
    assert len(list(each_on_a_thread(lambda at: meeting.wait(), range(8), writes=True))) == 8
