"""What the terminal shows, given the documents that --json prints."""

from typing import Any

import pytest

from sandhi_core.errors import Problem
from sandhi_core.report.text import print_build, print_check, print_dry_run

PLAN: dict[str, Any] = {
    "evaluations": 1234,
    "decompositions": 56,
    "bytes_read": 3 * 2**20,
    "bytes_written": 2**20,
    "groups": [{"key": "demo.h128-bf16", "models": ["sorter", "ranker"], "sets": 42, "nbytes": 2**19}],
    "excluded": [{"model": "roman", "slots": 28, "reason": "no other model agrees"}],
}
TASK = {
    "task": "sort[red]words[/red]",
    "metric": "acc",
    "budget": 0.02,
    "original": 0.959,
    "merged": 0.948,
    "low": -0.019,
    "high": 0.003,
    "within_budget": True,
    "certified": False,
}


def build_document(**changes: Any) -> dict[str, Any]:
    task = TASK | changes
    return {
        "ran": [["checkpoint", "sorter"], ["checkpoint", "ranker"], ["profile", "sorter"]],
        "evaluations": {"sorter": 30, "ranker": 12},
        "pools": {
            "demo": {
                "point": "deployed",
                "models": {"sorter": {**task, "tasks": [task, task | {"task": "second"}]}},
                "bytes": {
                    "checkpoints": 1000,
                    "duplicates": 100,
                    "added": 0,
                    "claimed": 500,
                    "verified_disk": 500,
                    "verified_memory": 480,
                },
                "rounding": [],
                "stock": None,
                "export": "/srv/exports/demo/0123",
                "report": "/srv/reports/demo/report.html",
                "deployment": "/srv/exports/demo/0123/deployment.json",
            }
        },
    }


def problem(severity: Any) -> dict[str, Any]:
    found = Problem(
        code="export-answers",
        severity=severity,
        model="[bold]sorter",
        file="a.safetensors",
        tensor="q",
        message="row 3 holds NaN",
        remedy="train it again",
    )
    return found.model_dump(mode="json")


LINE = "export-answers: model [bold]sorter file a.safetensors tensor q: row 3 holds NaN (train it again)"


def test_check_puts_problems_on_standard_error_and_no_cost_beside_errors(capsys: pytest.CaptureFixture[str]) -> None:
    print_check({"ok": False, "problems": [problem("error"), problem("warning")], "plan": PLAN})
    assert capsys.readouterr() == ("not sound: 1 error\n", f"error: {LINE}\nwarning: {LINE}\n")


def test_check_of_a_sound_pool_tells_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    print_check({"ok": True, "problems": [problem("warning")], "plan": PLAN})
    out, err = capsys.readouterr()
    assert "At most 1,234 evaluations, 56 matrices decomposed, 3.00 MiB read and 1.00 MiB written." in out
    assert "demo.h128-bf16" in out and "no other model agrees" in out
    assert out.endswith("sound\n")
    assert err == f"warning: {LINE}\n"


def test_only_models_that_can_share_are_listed_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"key": "demo.h96-bf16", "models": ["roman"], "sets": 0, "nbytes": 0}
    print_check({"ok": True, "problems": [], "plan": PLAN | {"groups": [*PLAN["groups"], alone], "excluded": []}})
    out = capsys.readouterr().out
    assert "demo.h128-bf16" in out and "demo.h96-bf16" not in out and "cannot be shared" not in out
    print_check({"ok": True, "problems": [], "plan": PLAN | {"groups": [alone]}})
    assert "No two models can share a matrix." in capsys.readouterr().out


def dry_run(**changes: Any) -> dict[str, Any]:
    stale, waiting = [["profile", "sorter"]], [["groups", "demo.h128"]]
    return {"ok": True, "problems": [], "stale": stale, "waiting": waiting, "plan": PLAN} | changes


def test_a_dry_run_lists_what_will_run_and_what_may(capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run(dry_run())
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "profile sorter will run" in lines
    assert "groups demo.h128 may run, if what it depends on changes" in lines
    assert "At most 1,234 evaluations" in out


def test_a_dry_run_of_an_unsound_pool_tells_no_cost(capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run(dry_run(ok=False, problems=[problem("error")]))
    out, err = capsys.readouterr()
    assert "At most" not in out and out.endswith("not sound: 1 error\n")
    assert err == f"error: {LINE}\n"


def test_a_dry_run_with_nothing_stale(capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run(dry_run(stale=[], waiting=[]))
    assert capsys.readouterr().out == "Nothing is stale.\n"


def test_build_shows_every_task_and_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    print_build(build_document())
    out = capsys.readouterr().out
    assert "sort[red]words[/red]" in out and "second" in out  # text from outside is no markup
    assert "-0.019 to +0.003" in out
    assert "verified in memory" in out and "48.0 %" in out
    assert "/srv/reports/demo/report.html" in out
    assert out.endswith("Ran 2 checkpoint, 1 profile; 42 evaluations.\n")
    assert max(map(len, out.splitlines())) <= 132
    assert all(line == line.rstrip() for line in out.splitlines())


def test_lines_are_whole_and_end_without_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    ran = [[f"stage_number_{n}", "key"] for n in range(30)]
    print_build(build_document() | {"ran": ran})
    reason = "word " * 60 + "end"
    excluded = [{"model": "roman", "slots": 28, "reason": reason}]
    print_check({"ok": True, "problems": [], "plan": PLAN | {"excluded": excluded}})
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Ran 1 stage_number_0,") and line.endswith("; 42 evaluations.") for line in lines)
    assert any(reason in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_build_that_had_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    print_build(build_document() | {"ran": [], "evaluations": {"sorter": 0}})
    assert capsys.readouterr().out.endswith("Nothing was stale, nothing ran.\n")


def test_long_paths_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    document = build_document()
    document["pools"]["demo"]["export"] = path = "/srv/" + "x" * 300
    print_build(document)
    assert f"export:     {path}\n" in capsys.readouterr().out


def test_build_tells_how_far_the_plan_of_adapters_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    document = build_document()
    print_build(document)
    assert "Stock adapters" not in capsys.readouterr().out
    document["pools"]["demo"]["stock"] = {
        "told": "2 of 4 models are adapters of one base",
        "complete": 2,
        "models": 4,
        "bases": {"base.0123": ["[red]a", "b"]},
        "ordinary": {
            "c": {"reason": "holds other tensors than a", "first": "model.norm.weight", "count": 3, "nbytes": 2**20},
            "d": {"reason": "is alone", "first": None, "count": 0, "nbytes": 0},
        },
        "weights_bytes_before": 3 * 2**20,
        "weights_bytes": 2**20,
    }
    print_build(document)
    out = capsys.readouterr().out
    assert "Stock adapters: 2 of 4 models are adapters of one base.\n  base.0123: [red]a, b\n" in out
    assert "  c is none: it holds other tensors than a, first model.norm.weight (3 in all, 1.00 MiB)\n" in out
    assert "  d is none: it is alone\n" in out
    assert (
        "Claimed are 500 B. Engines with adapters hold 1.00 MiB of weights in place of 3.00 MiB, 2.00 MiB less" in out
    )
    assert "its answers were not scored.\n" in out


def test_build_says_that_scores_are_of_another_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    document = build_document()
    print_build(document)
    assert "Quality was" not in capsys.readouterr().out
    document["pools"]["demo"]["rounding"] = ["scored in float32; served in bfloat16"]
    print_build(document)
    assert "\nQuality was scored in float32; served in bfloat16.\n" in capsys.readouterr().out


def test_what_residuals_add_is_a_row_where_they_add_anything(capsys: pytest.CaptureFixture[str]) -> None:
    document = build_document()
    print_build(document)
    assert "added by residuals" not in capsys.readouterr().out
    document["pools"]["demo"]["bytes"]["added"] = 20
    print_build(document)
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "added by residuals" in line]
    assert row == ["added", "by", "residuals", "20", "B", "20", "2.0", "%"]
