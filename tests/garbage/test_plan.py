"""What goes and what stays, on a root made by hand; nothing that Sandhi did not write ever goes."""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.disk import verify_disk
from sandhi_core.errors import StoreError
from sandhi_core.garbage.in_use import InUse
from sandhi_core.garbage.plan import Garbage, garbage
from sandhi_core.garbage.removal import remove
from sandhi_core.graph import UNREADABLE
from sandhi_core.layout import DEPLOYMENT, MANIFEST, read_manifest
from sandhi_core.records import Groups, MergedWeights
from tests.garbage.roots import INPUTS, NOBODY, OLD_INPUTS, Root


def by_kind(found: Garbage) -> dict[str, set[str]]:
    kinds = defaultdict(set)
    for removal in found.removals:
        kinds[removal.kind].add(removal.path.name)
    return kinds


def why(found: Garbage) -> dict[str, str]:
    return {export.path.name: export.why for export in found.kept}


def files(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() or p.is_symlink()}


def test_the_deployed_export_stays_and_as_many_earlier_ones_as_are_asked_for(root: Root) -> None:
    first, second, third = (path.name for path in root.exports)
    assert by_kind(root.garbage())["export"] == {first}
    assert why(root.garbage()) == {third: "deployed", second: "to go back to"}
    assert by_kind(root.garbage(keep=0))["export"] == {first, second}
    assert "export" not in by_kind(root.garbage(keep=2))


def test_the_last_good_deployment_stays_while_a_newer_export_is_not_proved(root: Root) -> None:
    first, second, third = root.exports
    (third / DEPLOYMENT).unlink()
    spec = root.artifacts.required(("deployment", "small")).record | {"export": str(second)}
    root.artifacts.save(("deployment", "small"), "", None, DeploymentSpec.model_validate(spec))
    found = root.garbage(keep=0)
    assert why(found) == {third.name: "the pool's newest", second.name: "deployed"}
    assert by_kind(found)["export"] == {first.name}


def test_what_is_in_use_stays(root: Root) -> None:
    first, second, _ = root.exports
    shared = {p.name: p for p in first.rglob("shared-*")}.popitem()[1]
    mapped = InUse({shared.stat().st_ino: {(7, str(shared))}}, {8: f"vllm serve {second}/single --port 1"}, 0)
    found = root.garbage(keep=0, in_use=mapped)
    assert "export" not in by_kind(found)
    assert why(found)[first.name] == "mapped by process 7"
    assert why(found)[second.name] == "named in the command of process 8"


def test_servers_of_the_deployed_export_do_not_keep_others_that_share_its_files(root: Root) -> None:
    first, _, third = root.exports
    links = defaultdict(set)
    for path in first.rglob("*"):
        links[path.stat().st_ino].add(path)
    (common, *_) = [p for p in third.rglob("shared-*") if p.stat().st_ino in links]
    for opened in (common, Path("/models", *common.parts[-4:])):  # as a container may see it
        mapped = InUse({common.stat().st_ino: {(7, str(opened))}}, {}, 0)
        assert by_kind(root.garbage(in_use=mapped))["export"] == {first.name}
    for above in ("/data/small/sandhi-artifacts", f"/data/small/{'0' * 16}"):  # folders that look like exports
        mapped = InUse({1: {(7, f"{above}/exports/small/{first.name}/single/x")}}, {}, 0)
        assert mapped.of(Path(above, "exports", "small", first.name), {1}) == "mapped by process 7"
        assert mapped.of(Path(above, "exports", "small", third.name), {1}) is None
    elsewhere = InUse({common.stat().st_ino: {(7, "/linked/by/hand.safetensors")}}, {}, 0)
    assert "export" not in by_kind(root.garbage(in_use=elsewhere))


def test_the_store_keeps_what_trajectories_plans_and_exports_refer_to(root: Root) -> None:
    kinds = by_kind(root.garbage(keep=0))
    held = {t.digest for m in read_manifest(root.exports[-1]).models.values() for t in m.tensors.values()}
    stored = {p.name for p in (root.case.root / "store").iterdir() if len(p.name) == 64}
    assert kinds["tensor"] == stored - held - root.wanted >= root.orphans
    assert len(kinds["recipe"]) == 1
    assert len(kinds["spectrum"]) == 2 and len(list((root.case.root / "spectra").iterdir())) == 4
    assert kinds["inputs"] == {OLD_INPUTS} and INPUTS["single"] not in kinds["inputs"]


def test_a_mapped_store_entry_stays(root: Root) -> None:
    (orphan,) = root.orphans
    (entry,) = (root.case.root / "store" / orphan).iterdir()
    found = root.garbage(in_use=InUse({entry.stat().st_ino: {(7, "/linked/elsewhere")}}, {}, 0))
    assert orphan not in by_kind(found)["tensor"]


def test_where_inputs_are_not_known_they_and_spectra_stay(root: Root) -> None:
    found = garbage(root.catalogue, root.artifacts, NOBODY, keep=0, gone=False, inputs=None)
    assert not {"inputs", "spectrum"} & by_kind(found).keys()


def test_groups_stay_while_a_model_of_their_pool_cannot_be_read(root: Root) -> None:
    groups = Groups(pool="small", key="small.h32-f32", models=(), groups=(), excluded=())
    root.artifacts.save(("groups", "small.h32-f32"), "", None, groups)

    def goes(group: str) -> bool:
        elsewhere = dict.fromkeys(root.case.checkpoints, "h48-f32")
        catalogue = replace(root.catalogue, group_of={**elsewhere, "single": group})
        found = garbage(catalogue, root.artifacts, NOBODY, keep=1, gone=False, inputs=INPUTS)
        return "small.h32-f32.json" in by_kind(found)["record"]

    assert goes("h48-f32") and not goes(UNREADABLE)


def test_other_pools_stay_unless_they_are_said_to_be_gone(root: Root) -> None:
    found = root.garbage(pools=False)
    assert found.others == ("small",) and not by_kind(found).keys() - {"tensor", "recipe"}
    assert by_kind(found)["tensor"] == root.orphans
    gone = by_kind(root.garbage(pools=False, gone=True))
    assert gone["export"] == {path.name for path in root.exports}
    assert gone["record"] >= {"small.json", "small.single.json", "single.json"}


def test_a_gone_pool_that_is_served_keeps_that_export(root: Root) -> None:
    _, second, _ = root.exports
    found = root.garbage(pools=False, gone=True, in_use=InUse({}, {9: f"vllm serve {second}/tied"}, 0))
    assert why(found) == {second.name: "named in the command of process 9"}
    remove(root.case.root, found.removals)
    assert not verify_disk(second, read_manifest(second)).problems


def test_removing_what_is_told_leaves_the_rest_to_the_byte(root: Root) -> None:
    before = files(root.case.root)
    found = root.garbage()
    doomed = {f.relative_to(root.case.root).as_posix() for r in found.removals for f in r.files}
    remove(root.case.root, found.removals)
    assert files(root.case.root) == before - doomed
    assert not root.garbage().removals
    for export in root.exports[1:]:
        assert not verify_disk(export, read_manifest(export)).problems
    assert root.case.export() == root.artifacts.load(MergedWeights, "merged_weights", "small")


@pytest.mark.parametrize(
    "place",
    [
        "notes.txt",
        "exports/notes.txt",
        "exports/small/notes.txt",
        "exports/small/backup/model.safetensors",
        "exports/small/0123456789abcdef/sandhi.json",
        "store/README",
        "store/mine/x.safetensors",
        "store/recipes/README",
        "spectra/mine.safetensors",
        "inputs/mine/x.safetensors",
        "records/plan/README",
        "scores/single.jsonl",
        "datasets/x",
    ],
)
def test_what_sandhi_did_not_write_stays(root: Root, place: str) -> None:
    foreign = root.case.root / place
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text("mine")
    remove(root.case.root, root.garbage(keep=0).removals)
    assert foreign.read_text() == "mine"


def test_an_export_with_a_file_of_somebody_else_stays_whole(root: Root) -> None:
    first = root.exports[0]
    (first / "single" / "tuned.safetensors").write_text("mine")
    before = files(first)
    found = root.garbage(keep=0)
    remove(root.case.root, found.removals)
    assert files(first) == before
    assert why(found)[first.name] == "left alone: single/tuned.safetensors is no part of it"


@pytest.mark.parametrize("damage", ["{", "", '{"schema_version": 99}'])
def test_an_export_with_a_manifest_that_cannot_be_read_stays(root: Root, damage: str) -> None:
    manifest = root.exports[0] / MANIFEST
    manifest.chmod(0o644)
    manifest.write_text(damage)
    found = root.garbage(keep=0)
    assert why(found)[root.exports[0].name].startswith("left alone: its manifest")


@pytest.mark.parametrize("damage", ["{", "", None])
@pytest.mark.parametrize(
    "record",
    [
        "deployment/small",
        "merged_weights/small",
        "plan/small.single",
        "trajectory/small.single",
        "checkpoint/single",
    ],
)
def test_a_record_that_cannot_be_read_says_nothing_of_what_is_needed(
    root: Root, record: str, damage: str | None
) -> None:
    """What it speaks of, the deployed export too, would be taken for garbage."""
    path = root.case.root / "records" / f"{record}.json"
    if damage is None:  # as from a disk that fails
        path.unlink()
        path.mkdir()
    else:
        path.write_text(damage)
    with pytest.raises(StoreError, match="what it needs is not known, and nothing is removed") as refused:
        root.garbage(keep=0)
    assert refused.value.problem.file == str(path) and "build its pool" in refused.value.problem.remedy


def test_records_of_pools_that_are_gone_need_not_be_read(root: Root) -> None:
    for stage, key in (("plan", "small.single"), ("deployment", "small")):
        (root.case.root / "records" / stage / f"{key}.json").write_text("{")
    assert by_kind(root.garbage(pools=False, gone=True))["export"] == {path.name for path in root.exports}


@pytest.mark.parametrize("folder", ["records/plan", "exports/small", "export", "store", "store/recipes", "spectra"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    root: Root, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = str(root.exports[0] / "single" if folder == "export" else root.case.root / folder)
    for name in ("listdir", "scandir"):
        real = getattr(os, name)

        def closing(path: str | Path, real: Callable[[str | Path], Any] = real) -> Any:
            if str(path) == closed:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path)

        monkeypatch.setattr(os, name, closing)
    with pytest.raises((StoreError, OSError)) as failed:
        root.garbage(keep=0)
    assert closed in str(failed.value)


def test_links_are_not_followed(root: Root, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(root.exports[0], outside)
    root.exports[0].symlink_to(outside)
    entry = root.case.root / "store" / ("f" * 64)
    entry.symlink_to(outside)
    before = files(outside)
    remove(root.case.root, root.garbage(keep=0).removals)
    assert files(outside) == before and root.exports[0].is_symlink() and entry.is_symlink()


def test_a_pool_whose_folder_leads_elsewhere_is_left_alone(root: Root, tmp_path: Path) -> None:
    home, outside = root.exports[0].parent, tmp_path / "outside"
    shutil.move(home, outside)
    home.symlink_to(outside)
    assert "export" not in by_kind(root.garbage(keep=0))


NAMES = st.text("0123456789abcdef.-_ é", min_size=1, max_size=64).filter(lambda n: n not in (".", ".."))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["store", "store/recipes", "exports/small", "spectra", "inputs", "records/plan"]), NAMES)
def test_files_of_any_name_at_any_place_stay_unless_the_name_is_of_the_layout(
    root: Root, folder: str, name: str
) -> None:
    path = root.case.root / folder / name
    if not path.exists():
        path.write_text("mine")
        told = {f for r in root.garbage().removals for f in r.files}
        of_layout = len(name.partition(".")[0]) == 64 and folder in ("spectra", "store/recipes")
        assert path not in told or of_layout or (folder == "records/plan" and os.fspath(path).endswith(".json"))
        path.unlink()
