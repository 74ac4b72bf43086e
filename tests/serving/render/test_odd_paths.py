"""An export may lie under any name: what is printed and written leads there, by a shell, Compose, Kubernetes or vLLM;
what cannot say the name says so."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from sandhi_core.__main__ import main
from sandhi_core.deploy import vllm
from sandhi_core.deploy.check import check_deployment
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import DeploySettings, Engine
from tests.conftest import CHECKOUT
from tests.deployed import deployed
from tests.exported import make_case, make_models

NAMES = {
    "spaces": " a  b ",
    "quotes": """it's "so" `id`""",
    "dollars": "$HOME ${HOME} $$ $(id)",
    "percent": "100%s %(x)s",
    "lines": "one\ntwo\r\tthree",
    "dash": "-rf --out",
    "letters": "für 模型 \U0001f9ea e\u0301",
    "invisible": "a\u00a0b\u2028c\ufeffd\u202ee\x07f\x85g",
    "braces": "{} {0} {{x}} [a] *?",
    "colons": "c:d:ro",
    "commas": "a,readonly=x",
    "yaml": "- a: &b *c !d #e | > ~",
    "backslashes": "a\\nb\\\\c\\",
}


def exported_in(root: Path, models: Path, engine: Engine = "transformers") -> Path:
    case = make_case(root, make_models(models, head_dim=32))  # vLLM's least
    settings = DeploySettings(engine=engine, device_memory="1GiB")
    case.pool = case.pool.model_copy(update={"deploy": settings})
    return deployed(case)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    return exported_in(root, root / "models")


def moved(exported: Path, name: "str | bytes", tmp_path: Path) -> Path:
    export = tmp_path / os.fsdecode(name) / "export"
    shutil.copytree(exported, export, copy_function=os.link)
    return export


def answered(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    status = main([*words, "--json"])
    found = json.loads(capfd.readouterr().out)
    assert status == 0 and found["ok"], found
    return found


@pytest.mark.parametrize("name", NAMES)
def test_everything_leads_to_an_export_of_any_name(
    exported: Path, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export = moved(exported, NAMES[name], tmp_path)
    out = export.parent / NAMES[name]
    for to in ("compose", "kubernetes", "litellm"):
        found = answered(capfd, "render", str(export), "--to", to, "--out", str(out), "--engine", "transformers")
        assert found["export"] == str(export) and found["written"] == [str(out / f"{to}.yaml")]
    text = (out / "compose.yaml").read_text(encoding="utf-8")
    compose_spec.PyCompose.from_yaml(text)
    for service in yaml.safe_load(text)["services"].values():
        (mount,) = service["volumes"]
        assert mount["source"].replace("$$", "\0").count("$") == 0  # Compose puts $ for $$, and variables for $
        assert mount["source"].replace("$$", "$") == str(export)
        assert mount["bind"] == {"create_host_path": False}  # given to Docker as fields, not as source:target:ro
    for document in yaml.safe_load_all((out / "kubernetes.yaml").read_text(encoding="utf-8")):
        kubernetes_validate.validate(document, "1.37", strict=True)
        if document["kind"] == "Deployment":
            (volume,) = document["spec"]["template"]["spec"]["volumes"]
            assert volume["hostPath"]["path"] == str(export)
    assert str(export) not in (out / "litellm.yaml").read_text(encoding="utf-8")
    assert answered(capfd, "verify", str(export))["problems"] is not None
    (warned,) = check_deployment(export, read_manifest(export))  # of its commands, which are for where it was
    assert warned.severity == "warning"


@pytest.mark.parametrize("name", NAMES)
def test_a_shell_runs_the_commands_that_are_shown(
    exported: Path, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export, python = moved(exported, NAMES[name], tmp_path), tmp_path / f"{NAMES[name]}.python"
    python.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv]))\n")
    python.chmod(0o755)
    words = ("serve", str(export), "--dry-run", "--engine", "transformers", "--python", str(python), "--device", "cpu")
    planned = answered(capfd, *words)["servers"]
    assert main(words) == 0
    shown = capfd.readouterr().out
    assert len(shlex.split(shown, comments=True)) > 0
    for shell in ("bash", "sh"):
        done = subprocess.run([shell, "-c", shown], capture_output=True, text=True, check=True)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert found == [[str(export), *server["command"]] for server in planned]


def test_a_deployment_that_is_made_in_such_a_place_says_commands_that_lead_there(tmp_path: Path) -> None:
    root = tmp_path / "".join(sorted({*"".join(NAMES.values()), "="} - {"/"}))
    root.mkdir()
    export = exported_in(root, tmp_path / "models", "vllm")
    assert check_deployment(export, read_manifest(export)) == []
    for server in json.loads((export / "deployment.json").read_text())["servers"]:
        words = shlex.split(server["shell"])
        assert words[words.index("--model") + 1] == str(export / server["directory"])
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {server['shell']}"], capture_output=True, check=True)
        assert done.stdout.decode().split("\0")[:-1] == words


def test_vllm_reads_the_paths_of_adapters_as_they_are() -> None:
    """By the rule of its LoRAParserAction: `name=path` where there is no comma, else JSON; versions differ in what they
    make of a second `=`."""
    for name in [*NAMES.values(), "a=b", 'q"=,']:
        export = Path("/srv") / name
        command = vllm.command(export, "base", (), 8000, adapters={"one": "a.adapter", "two": "b.adapter"})
        parser = ArgumentParser()
        parser.add_argument("--model")
        parser.add_argument("--lora-modules", nargs="+")
        given, _ = parser.parse_known_args(command[3:])
        assert given.model == str(export / "base")
        found = {}
        for item in given.lora_modules:
            if "=" in item and "," not in item:
                adapter, path = item.split("=")
            else:
                adapter, path = (module := json.loads(item))["name"], module["path"]
            found[adapter] = path
        assert found == {"one": str(export / "a.adapter"), "two": str(export / "b.adapter")}


def test_a_name_that_is_no_text_is_refused_by_what_cannot_say_it(exported: Path, tmp_path: Path) -> None:
    export = moved(exported, b"caf\xe9", tmp_path)
    for to, status in (("compose", 2), ("kubernetes", 2), ("litellm", 0)):
        words = [sys.executable, "-m", "sandhi_core", "render", export, "--to", to, "--out", tmp_path / "out", "--json"]
        done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, check=False)
        found = json.loads(done.stdout)
        assert done.returncode == status, done.stderr
        if status:
            (problem,) = found["problems"]
            assert problem["code"] == "usage" and "caf\\xe9" in problem["message"] and "--path" in problem["remedy"]
            assert not (tmp_path / "out" / f"{to}.yaml").exists()
    shown = [sys.executable, "-m", "sandhi_core", "serve", export, "--dry-run", "--engine", "transformers"]
    done = subprocess.run(shown, cwd=CHECKOUT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert os.fsencode(export) in done.stdout
