"""docs/reference.md holds what the command prints, and the recorded pool can be reported."""

from pathlib import Path

import pytest

from pipelines.reporting import report_pool
from tests.conformance import CHECKOUT, artifact
from tests.conformance.pool import write_pool
from tests.conformance.recorded import RecordedRun
from tests.conformance.tables import tables

PUBLISHED = {"deepseek2", "llama5", "qwen25_2"}


def test_tables_of_the_document() -> None:
    runs = {path.name for path in (artifact() / "runs").glob("*")}
    if runs != PUBLISHED:
        pytest.skip(f"docs/reference.md is of {sorted(PUBLISHED)}; {artifact()} holds {sorted(runs)}")
    text = (CHECKOUT / "docs" / "reference.md").read_text()
    _, _, rest = text.partition("<!-- python -m tests.conformance -->\n")
    assert rest.partition("<!-- end -->")[0] == tables(artifact())


def test_a_recorded_run_is_reported(run: RecordedRun, tmp_path: Path) -> None:
    file = write_pool(run, tmp_path / "recorded")
    page = report_pool(file, tmp_path / "recorded" / "root")
    pictures = {path.name for path in page.parent.glob("*.png")}
    assert {"sensitivity.png", "pareto.png"} | {f"trajectory-{m.name}.png" for m in run.models} <= pictures
    text = page.read_text()
    assert all(m.name in text for m in run.models)


def test_profiles_hold_every_recorded_score(run: RecordedRun) -> None:
    for model in run.models:
        if model.profile is not None:
            kinds = {(s.layer, s.component) for s in model.profile.sensitivities}
            assert kinds == {(n, kind) for n in range(model.family.layers) for kind in ("attn", "mlp")}
