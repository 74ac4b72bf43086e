import json
from pathlib import Path

from sandhi_core.artifacts import Artifacts
from sandhi_core.records import HoldoutScore, canonical_json
from tests.synthetic import holdout

NODE = ("holdout", "pool.a")


def test_a_record_is_kept_as_canonical_json_and_read_back(tmp_path: Path) -> None:
    artifacts, record = Artifacts(tmp_path), holdout("a", [1, 3])
    own = {"budget": 0.02, "files": ["ä", None]}
    version = artifacts.save(NODE, "wanted", own, record)
    data = (tmp_path / "records" / "holdout" / "pool.a.json").read_bytes()
    assert data == canonical_json(json.loads(data)) + b"\n"
    assert version == record.digest
    assert artifacts.load(HoldoutScore, *NODE) == record
    envelope = artifacts.required(NODE)
    assert (envelope.stage, envelope.key, envelope.fingerprint, envelope.own) == (*NODE, "wanted", own)


def test_a_record_of_another_node_or_with_other_bytes_is_none(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    artifacts.save(NODE, "", None, holdout("a", [1]))
    path = tmp_path / "records" / "holdout" / "pool.a.json"
    text = path.read_text()
    path.with_name("pool.b.json").write_text(text)
    assert artifacts.envelope(("holdout", "pool.b")) is None
    path.write_text(text.replace('"steps":1', '"steps":2', 1))
    assert artifacts.envelope(NODE) is None
