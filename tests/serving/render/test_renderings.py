"""What is rendered is taken by the tools' own schemas, says what the deployment says, and is the same twice."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import compose_spec
import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.errors import StoreError, UsageError
from sandhi_core.pools.pool import DeploySettings
from sandhi_core.serving.members import Deployed, Member, members, opened
from sandhi_core.serving.render.containers import RUNTIME_BYTES, Target, memory_bytes
from sandhi_core.serving.render.litellm import proxy_config
from sandhi_core.serving.render.writing import To, rendered, write
from tests.adapted import adapted_case
from tests.deployed import deployed
from tests.exported import make_case, make_models

CHECKOUT = Path(__file__).parents[3]
VERSIONS = ("1.25", "1.37")  # the oldest and the newest that kubernetes-validate has


@pytest.fixture(scope="module", params=["plugin", "stock", "transformers", "adapters"])
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    root = tmp_path_factory.mktemp("root")
    if request.param == "adapters":
        return opened(deployed(adapted_case(root)))
    case = make_case(root, make_models(root / "models", head_dim=32))  # vLLM's least on a CPU
    engine = "transformers" if request.param == "transformers" else "vllm"
    deploy = DeploySettings(engine=engine, plugin=request.param == "plugin", device_memory="1GiB")
    case.pool = case.pool.model_copy(update={"deploy": deploy})
    return opened(deployed(case))


@pytest.fixture(scope="module")
def chosen(export: Deployed) -> tuple[Member, ...]:
    """All of them; of the pool with adapters those that a server answers for."""
    if export.manifest.stock is None:
        return members(export)
    return members(export, only=["ann", "far"])


def documents(data: bytes) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(data))


# --- the tools' own schemas ---------------------------------------------------------------------------------


def test_compose_takes_it(export: Deployed, chosen: tuple[Member, ...]) -> None:
    data = rendered("compose", export, chosen, Target())
    found = compose_spec.PyCompose.from_yaml(data.decode())
    assert list(found.service_names()) == [member.host_name for member in chosen]
    with pytest.raises(ValueError, match="wrong"):  # it does look at every field
        compose_spec.PyCompose.from_yaml(data.decode().replace("working_dir:", "wrong_dir:"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("claim", [None, "models"])
def test_kubernetes_takes_it(export: Deployed, chosen: tuple[Member, ...], version: str, claim: str | None) -> None:
    data = rendered("kubernetes", export, chosen, Target(path="exports/p" if claim else "", claim=claim))
    found = documents(data)
    assert [document["kind"] for document in found] == ["Deployment", "Service"] * len(chosen)
    for document in found:
        kubernetes_validate.validate(document, version, strict=True)
    wrong = copy.deepcopy(found[0])
    wrong["spec"]["template"]["spec"]["containers"][0]["imagine"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


# --- what they say ------------------------------------------------------------------------------------------


def test_every_container_reads_the_export_and_writes_nothing_there(
    export: Deployed, chosen: tuple[Member, ...]
) -> None:
    (compose,) = documents(rendered("compose", export, chosen, Target(image="registry/vllm:1")))
    before = None
    for member in chosen:
        service = compose["services"][member.host_name]
        (volume,) = service["volumes"]
        assert volume.pop("bind") == {"create_host_path": False}
        assert volume == {"type": "bind", "source": str(export.root), "target": "/export", "read_only": True}
        assert service["image"] == "registry/vllm:1"
        assert service["ports"] == [f"127.0.0.1:{member.port}:{member.port}"]  # and at no other address of the host
        assert service["entrypoint"] == list(member.command(Path("/export"), python="python3", host="0.0.0.0"))
        assert not any(str(export.root) in word for word in service["entrypoint"])
        assert service.get("depends_on") == (before and {before: {"condition": "service_healthy"}})
        assert ("prometheus.io/path" in service["labels"]) == (member.engine == "vllm")
        before = member.host_name


def test_pods_meet_on_one_node_over_one_volume(export: Deployed, chosen: tuple[Member, ...]) -> None:
    hosted, claimed = (
        documents(rendered("kubernetes", export, chosen, target))[0]["spec"]["template"]["spec"]
        for target in (Target(), Target(claim="models", path="exports/p"))
    )
    assert hosted["volumes"][0]["hostPath"] == {"path": str(export.root), "type": "Directory"}
    assert claimed["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    (mount,) = claimed["containers"][0]["volumeMounts"]
    assert mount == {"name": "export", "mountPath": "/export", "readOnly": True, "subPath": "exports/p"}
    assert "subPath" not in hosted["containers"][0]["volumeMounts"][0]
    (term,) = hosted["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    found = documents(rendered("kubernetes", export, chosen, Target()))
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in found if d["kind"] == "Deployment"]
    for label in labels:  # all of the pool, and each service its own
        assert term["labelSelector"]["matchLabels"].items() <= label.items()
    for service in (d for d in found if d["kind"] == "Service"):
        assert sum(service["spec"]["selector"].items() <= label.items() for label in labels) == 1


def test_memory_counts_what_is_mapped_for_the_first_alone(export: Deployed, chosen: tuple[Member, ...]) -> None:
    memory = memory_bytes(export, chosen)
    weights = sum(memory.values()) - len(chosen) * RUNTIME_BYTES  # and no cache: that is of a device, not of the host
    copies = sum(member.private_bytes + member.shared_bytes for member in chosen)
    if export.manifest.stock is None:
        sizes = export.spec.memory
        once = sizes.weights_bytes_after if chosen[0].maps else sizes.weights_bytes_before
        assert weights == once and (once < copies) == chosen[0].maps
    else:
        assert weights == copies


def test_the_proxy_routes_by_name(export: Deployed, chosen: tuple[Member, ...]) -> None:
    (config,) = documents(proxy_config(chosen))
    routes = {entry["model_name"]: entry["litellm_params"] for entry in config["model_list"]}
    assert sorted(routes) == sorted(name for member in chosen for name in member.models)
    for member in chosen:
        for name in member.models:
            provider = "hosted_vllm" if member.engine == "vllm" else "openai"
            assert routes[name]["model"] == f"{provider}/{name}"
            assert routes[name]["api_base"] == f"http://{member.host_name}:{member.port}/v1"
    (here,) = documents(proxy_config(chosen, "127.0.0.1"))
    assert {urlhost(entry) for entry in here["model_list"]} == {"127.0.0.1"}


def urlhost(entry: dict[str, Any]) -> str:
    base: str = entry["litellm_params"]["api_base"]
    return base.split("/")[2].split(":")[0]


# --- names and bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", get_args(To))
def test_the_bytes_are_the_same_twice(export: Deployed, chosen: tuple[Member, ...], to: To, tmp_path: Path) -> None:
    path = write(to, export, chosen, Target(), tmp_path / "out")
    first = path.read_bytes()
    assert path.name == f"{to}.yaml" and write(to, export, chosen, Target(), tmp_path / "out").read_bytes() == first
    assert b"&id" not in first and [p.name for p in path.parent.iterdir()] == [path.name]
    moved = tmp_path / "moved"
    shutil.copytree(export.root, moved, copy_function=os.link)
    again = opened(moved)
    assert rendered(to, again, chosen, Target(path=str(export.root))) == first


def test_a_dollar_in_a_path_is_no_variable(export: Deployed, chosen: tuple[Member, ...]) -> None:
    (compose,) = documents(rendered("compose", export, chosen, Target(path="/srv/$HOME/p")))
    assert {s["volumes"][0]["source"] for s in compose["services"].values()} == {"/srv/$$HOME/p"}


@pytest.mark.parametrize(
    ("name", "label"), [("Chemist_2", "chemist-2"), ("7b", "m-7b"), ("a" * 64, "a" * 63), ("x_", "x")]
)
def test_names_are_labels_of_hosts(chosen: tuple[Member, ...], name: str, label: str) -> None:
    assert replace(chosen[0], name=name).host_name == label


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True))
def test_every_name_of_a_model_becomes_a_label(name: str) -> None:
    label = Member(name, (), "", "vllm", 1, (), None, False, 0, 0, None).host_name
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", label)


@pytest.mark.parametrize("to", get_args(To))
def test_two_models_of_one_label_are_refused(export: Deployed, chosen: tuple[Member, ...], to: To) -> None:
    pair = (replace(chosen[0], name="x"), replace(chosen[0], name="x_"))
    with pytest.raises(UsageError, match="x and x_ would both be the host x"):
        rendered(to, export, pair, Target())


@pytest.mark.parametrize(
    ("path", "claim", "message"),
    [
        ("srv/p", None, "is relative"),
        ("/srv/p", "c", "out of the claim"),
        ("a/../../b", "c", "out of the claim"),
        ("/a/../b", None, "has .. in it"),
    ],
)
def test_paths_that_cannot_be_mounted(path: str, claim: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Target.of(None, path, claim, None)


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_writes_one_file_and_says_which(
    export: Deployed, chosen: tuple[Member, ...], tmp_path: Path
) -> None:
    only = [name for member in chosen for name in member.models]
    command = [sys.executable, "-m", "sandhi_core", "render", str(export.root), "--to", "compose", "--json"]
    command += ["--out", str(tmp_path / "out"), "--only", *only]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["ok"] and found["written"] == [str(tmp_path / "out" / "compose.yaml")]
    assert Path(found["written"][0]).read_bytes() == rendered("compose", export, chosen, Target())
    wrong = subprocess.run([*command, "--claim", "x"], cwd=CHECKOUT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "--claim is for --to kubernetes" in wrong.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"claim": "UP per"}, "--claim 'UP per' is no name of a claim"),
        ({"claim": "-a"}, "is no name of a claim"),
        ({"image": "a\n- b: c"}, "--image .* has unprintable characters"),
        ({"path": "/a\x00b"}, "--path .* has unprintable characters"),
        ({"host": "a b/c@d"}, "--host 'a b/c@d' is no host"),
    ],
)
def test_what_no_tool_would_take(given: dict[str, str], message: str) -> None:
    nothing = dict.fromkeys(("image", "path", "claim", "host"))
    with pytest.raises(UsageError, match=message):
        Target.of(**nothing | given)


def test_an_address_of_colons_is_put_in_brackets(export: Deployed, chosen: tuple[Member, ...]) -> None:
    (document,) = documents(rendered("litellm", export, chosen, Target.of(None, None, None, "::1")))
    addresses = [model["litellm_params"]["api_base"] for model in document["model_list"]]
    assert addresses and all(address.startswith("http://[::1]:") for address in addresses)


def test_nothing_is_written_into_the_export(export: Deployed, chosen: tuple[Member, ...]) -> None:
    with pytest.raises(UsageError, match="is in the export"):
        write("compose", export, chosen, Target(), export.root / "deploy")
    assert not (export.root / "deploy").exists()


def test_a_folder_that_cannot_be_is_an_error(export: Deployed, chosen: tuple[Member, ...], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        write("litellm", export, chosen, Target(), tmp_path / "out")
