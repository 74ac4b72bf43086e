"""What fails: tried again where it can pass by itself, refused at once where not, and what is deployed stays so."""

import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.stage import RETRIES
from pipelines.assembly import build_definitions
from pipelines.headless import BuildError, build
from pipelines.instance import opened_instance
from pipelines.progress import Progress
from pipelines.settings import Settings
from sandhi_core.catalogue import load_catalogue
from sandhi_core.preflight.checks import check_model
from tests.pipelines.conftest import PoolWriter

CHECKED = "assets.checkpoint.check_model"


@pytest.fixture
def settings(tiny_pool: PoolWriter, tmp_path: Path) -> Settings:
    return Settings(tiny_pool(["a", "b"]), tmp_path / "root", retry_seconds=0)


def failing(times: int, error: Exception) -> Callable[..., Any]:
    """check_model, after so many errors."""
    left = itertools.count(times, -1)

    def checked(*arguments: Any) -> Any:
        if next(left) > 0:
            raise error
        return check_model(*arguments)

    return checked


def run(settings: Settings, told: Callable[[str], None] = lambda text: None) -> dg.ExecuteInProcessResult:
    """The checkpoint stage of a, in a real run."""
    definitions = build_definitions(load_catalogue(settings.pool_files()), settings, told=told)
    with opened_instance(settings.root) as instance:
        return definitions.resolve_job_def("build_checkpoint").execute_in_process(
            instance=instance,
            partition_key="a",
            raise_on_error=False,
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        )


def tries(result: dg.ExecuteInProcessResult) -> int:
    return 1 + sum(event.is_step_restarted for event in result.all_events)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no memory")])
def test_what_can_pass_by_itself_is_tried_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    said: list[str] = []
    monkeypatch.setattr(CHECKED, failing(RETRIES, error))
    result = run(settings, said.append)
    assert result.success and tries(result) == 1 + RETRIES
    assert len(said) == RETRIES and all("can pass by itself and is tried again" in text for text in said)


def test_what_does_not_pass_fails_in_the_end(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECKED, failing(1000, OSError(errno.EIO, "Input/output error")))
    result = run(settings)
    assert not result.success and tries(result) == 1 + RETRIES


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "No such file"), ValueError("a mistake of ours")])
def test_nothing_else_is_tried_again(settings: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(CHECKED, failing(1, error))
    result = run(settings)
    assert not result.success and tries(result) == 1
    (event,) = result.get_step_failure_events()
    failure = event.step_failure_data.user_failure_data
    assert failure is not None and failure.description == f"unexpected {type(error).__name__}: {error}"


def test_bad_input_is_refused_once_in_its_own_words(settings: Settings) -> None:
    (settings.pools.parent / "a" / "model.safetensors").write_bytes(b"no weights")
    result = run(settings)
    assert not result.success and tries(result) == 1
    (event,) = result.get_step_failure_events()
    failure = event.step_failure_data.user_failure_data
    assert failure is not None and failure.description.startswith("error: ") and "model a" in failure.description
    assert failure.metadata["deployed"].value == "tiny was never deployed"


def test_the_pause_grows() -> None:
    policy = dg.RetryPolicy(RETRIES, 30, dg.Backoff.EXPONENTIAL)
    assert [policy.calculate_delay(n) for n in range(1, RETRIES + 1)] == [30, 90, 210]


@pytest.mark.slow
def test_a_failure_keeps_the_last_good_deployment_and_says_so(
    tiny_pool: PoolWriter, tmp_path: Path, only_the_line: None
) -> None:
    settings = Settings(tiny_pool(["a", "b"]), tmp_path / "root")
    build(load_catalogue(settings.pool_files()), settings, Progress({}))
    deployed = settings.artifacts().deployed("tiny")
    assert deployed is not None
    before = deployed.read_bytes()
    good = (tmp_path / "b" / "model.safetensors").read_bytes()
    (tmp_path / "b" / "model.safetensors").write_bytes(good[:-2])
    with pytest.raises(BuildError, match=f"tiny stays deployed as {deployed}"):
        build(load_catalogue(settings.pool_files()), settings, Progress({}))
    assert deployed.read_bytes() == before and json.loads(before)["servers"]
    # A deployment whose files were damaged since is no good one.
    next(deployed.parent.glob("a/*.safetensors")).unlink()
    with pytest.raises(BuildError, match="the files of tiny's last deployment are no longer what they were"):
        build(load_catalogue(settings.pool_files()), settings, Progress({}))
