"""`make ui`, started and stopped."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.pipelines.conftest import PoolWriter, until_it_answers


@pytest.mark.slow
def test_stopping_the_ui_is_no_failure(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool = tiny_pool(["a", "b"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with subprocess.Popen(
        [sys.executable, "-m", "pipelines.ui", "--port", port],
        cwd=CHECKOUT,
        env=os.environ | {"SANDHI_HOME": str(tmp_path / "root"), "SANDHI_POOLS": str(pool)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        text, starting = "", {"Serving dagster-webserver", "configured with the following daemons"}
        try:
            for line in process.stdout:
                text += line
                if starting and not (starting := {words for words in starting if words not in text}):
                    # Before it answers, Dagster's webserver prints a traceback of its own where it is stopped.
                    until_it_answers(f"http://127.0.0.1:{port}")
                    os.killpg(process.pid, signal.SIGINT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, text
    assert "services shut down" in text
    # One of Dagster's services may still say "Aborted!" of itself.
    assert not any(word in text for word in ("superseded", "Traceback")), text
