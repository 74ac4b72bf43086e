"""What `sandhi verify` prints, from documents and from both command lines."""

from typing import Any

import pytest

from sandhi_core.verification.told import tell


def verify_table(**changes: Any) -> dict[str, Any]:
    part = {"tensors": 3, "bytes": 3 * 2**10}
    row = {"weights": "w", "linked": "hardlink", "private": part, "duplicate": part, "merged": part}
    return {
        "ok": True,
        "export": "/e",
        "manifest": "ab",
        "pool": "demo",
        "point": "deployed",
        "models": {"sorter": row, "ranker": row},
        "tensors_checked": 18,
        "bytes": {
            "checkpoints": 4000,
            "claimed": 1000,
            "saved": 1000,
            "models": 4000,
            "distinct": 3000,
            "shared": 1000,
        },
        "memory": None,
        "answers": None,
        "problems": [],
    } | changes


def test_verify_of_a_sound_export(capsys: pytest.CaptureFixture[str]) -> None:
    tell(verify_table())
    out = capsys.readouterr().out
    assert "hardlink" in out and "Saved\n" not in out and "25.0 % saved" in out
    assert "duplicate" in out and "identical" not in out  # the manifest's word
    assert out.endswith("18 tensors re-read: everything is as recorded\n")


def servers(pss: int, others: int = 0) -> dict[str, Any]:
    held = {"rss": 2**20, "pss": pss, "shared": 2**20, "private": 0, "private_dirty": 0, "unmapped": 3, "whole": 2**30}
    none = dict.fromkeys(held, 0) | {"whole": 2**28}
    processes = [{"pid": 10, **held}, *({"pid": 11 + at, **none} for at in range(others))]
    server = {**held, "requests": 3, "seconds": 0.25, "processes": processes}
    return {"engine": "an [engine]", "servers": {"sorter": server, "ranker": server}, "sum": held}


def test_verify_with_servers(capsys: pytest.CaptureFixture[str]) -> None:
    memory = servers(2**19, others=2) | {"shared": 900, "saved": None, "originals": None}
    tell(verify_table(memory=memory))
    out = capsys.readouterr().out
    assert "Servers of the export: an [engine]" in out and "Servers of the originals" not in out
    assert out.count("512 KiB") == 3 and out.count("250 ms") == 2
    assert out.count("2 others") == 2 and out.count("512 MiB") == 2  # the sum of what they take
    assert "claimed" in out and "on disk" in out and "900" in out and "less than the originals" not in out


def test_verify_with_servers_of_the_originals(capsys: pytest.CaptureFixture[str]) -> None:
    tell(verify_table(memory=servers(1) | {"shared": 900, "saved": 950, "originals": servers(2)}))
    out = capsys.readouterr().out
    assert "Servers of the originals: an [engine]" in out
    assert "in memory, less than the originals" in out and "950" in out and "23.8 %" in out


def test_verify_with_answers(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"reference": "the search's weights", "dtype": "float32", "prompts": 50, "tokens": 400, "different": 2}
    found |= {"ties": 1, "largest": 3.2e-5, "equal": False}
    tell(verify_table(answers={"sorter": found}))
    out = capsys.readouterr().out
    assert "log-probability off by" in out and "3.2e-05" in out
    assert "sorter is held to the search's weights." in out


def test_verify_names_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    error = {"code": "export-file", "severity": "error", "model": "sorter", "file": "[link=x]q[/link]"}
    error |= {"message": "is missing", "remedy": "restore it"}
    warning = {"code": "deployment", "severity": "warning", "message": "elsewhere", "remedy": "serve there"}
    tell(verify_table(ok=False, problems=[error, error, warning]))
    out, err = capsys.readouterr()
    assert "error: export-file: model sorter file [link=x]q[/link]: is missing (restore it)\n" in err
    assert "warning: deployment: elsewhere (serve there)\n" in err
    assert out.endswith("18 tensors re-read: 2 errors\n")
