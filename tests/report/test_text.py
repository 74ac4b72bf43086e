"""What the terminal shows, given the documents that --json prints."""

from typing import Any

import pytest

from sandhi_core.errors import Problem
from sandhi_core.report.text import print_build, print_check, print_dry_run, print_verify

PLAN = {
    "evaluations": 1234,
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
                    "claimed": 500,
                    "verified_disk": 500,
                    "verified_memory": 480,
                },
                "export": "/srv/exports/demo/0123",
                "report": "/srv/reports/demo/report.html",
                "deployment": "/srv/exports/demo/0123/deployment.json",
            }
        },
    }


def problem(severity: Any) -> dict[str, Any]:
    found = Problem(
        code="non-finite",
        severity=severity,
        model="[bold]sorter",
        file="a.safetensors",
        tensor="q",
        message="row 3 holds NaN",
        remedy="train it again",
    )
    return found.model_dump(mode="json")


def test_check_lists_problems_with_remedies_and_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    print_check({"ok": False, "problems": [problem("error"), problem("warning")], "plan": PLAN})
    out, err = capsys.readouterr()
    line = "non-finite: model [bold]sorter file a.safetensors tensor q: row 3 holds NaN (train it again)"
    assert f"error: {line}\nwarning: {line}\n" in out
    assert "At most 1,234 evaluations, 3.00 MiB read and 1.00 MiB written." in out
    assert "demo.h128-bf16" in out and "no other model agrees" in out
    assert out.endswith("not sound: 1 error\n")
    assert err == ""


def test_check_of_a_sound_pool(capsys: pytest.CaptureFixture[str]) -> None:
    print_check({"ok": True, "problems": [], "plan": PLAN | {"excluded": []}})
    out = capsys.readouterr().out
    assert out.endswith("sound\n") and "without a partner" not in out


def test_a_dry_run_lists_what_is_stale_and_what_waits(capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run(
        {
            "ok": True,
            "problems": [],
            "stale": [["profile", "sorter"]],
            "waiting": [["groups", "demo.h128"]],
            "plan": PLAN,
        }
    )
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "profile sorter stale" in lines and "groups demo.h128 waiting" in lines


def test_a_dry_run_with_nothing_stale(capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run({"ok": True, "problems": [], "stale": [], "waiting": [], "plan": PLAN})
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


def test_build_that_had_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    print_build(build_document() | {"ran": [], "evaluations": {"sorter": 0}})
    assert capsys.readouterr().out.endswith("Nothing was stale, nothing ran.\n")


def test_long_paths_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    document = build_document()
    document["pools"]["demo"]["export"] = path = "/srv/" + "x" * 300
    print_build(document)
    assert f"export:     {path}\n" in capsys.readouterr().out


def verify_table(**changes: Any) -> dict[str, Any]:
    part = {"tensors": 3, "bytes": 3 * 2**10}
    row = {"weights": "w", "linked": "hardlink", "private": part, "duplicate": part, "merged": part}
    return {
        "export": "/e",
        "manifest": "ab",
        "pool": "demo",
        "point": "deployed",
        "models": {"sorter": row, "ranker": row},
        "tensors_checked": 18,
        "bytes": {"models": 4000, "distinct": 3000, "shared": 1000},
        "memory": None,
        "problems": [],
    } | changes


def test_verify_of_a_sound_export(capsys: pytest.CaptureFixture[str]) -> None:
    print_verify(verify_table())
    out = capsys.readouterr().out
    assert "not measured" in out and "hardlink" in out and "25.0 % shared" in out
    assert out.endswith("18 tensors re-read: every digest is as recorded\n")


def test_verify_with_memory(capsys: pytest.CaptureFixture[str]) -> None:
    process = {"rss": 9, "pss": 2**20, "private_dirty": 0, "unmapped": 2**20}
    memory = {"engine": "transformers", "processes": {"sorter": process, "ranker": process}, "saved": 2**30}
    print_verify(verify_table(memory=memory))
    out = capsys.readouterr().out
    assert out.count("2.00 MiB") == 2 and "In memory 1.00 GiB are shared (transformers)." in out


def test_verify_names_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    print_verify(verify_table(problems=["sorter: [link=x]q[/link] differs", "extra file"]))
    out = capsys.readouterr().out
    assert "problem: sorter: [link=x]q[/link] differs\nproblem: extra file\n" in out
    assert out.endswith("18 tensors re-read: 2 problems\n")
