"""Where runs go: to this machine, to a Ray cluster or to Kubernetes. The stages know nothing of it.

What fans out are runs, not steps within a run: a run is one partition of one stage, and what may run at once are
partitions (the profiles of a wave, its trajectories). An executor that sends steps away would have one step to send.
So `dagster.yaml` names the run launcher (docs/scale/), and this module says what depends on it in the definitions:
that a run which scores asks for a device, and that a step runs in its run's own process: there is nothing else in it.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import dagster as dg
from dagster._config import process_config

from pipelines.settings import CLUSTER
from sandhi_core.errors import UsageError

NEEDS = "SANDHI_SCORING"


def _ray(needs: dict[str, Any]) -> None:
    from dagster_ray.core.run_launcher import RayLauncherConfig

    found = process_config(RayLauncherConfig.to_config_schema().as_field().config_type, needs)
    if found.errors:
        raise ValueError("; ".join(error.message for error in found.errors))


def _kubernetes(needs: dict[str, Any]) -> None:
    from dagster_k8s.job import USER_DEFINED_K8S_CONFIG_KEY, get_user_defined_k8s_config

    get_user_defined_k8s_config({USER_DEFINED_K8S_CONFIG_KEY: json.dumps(needs)})


class _Launcher(NamedTuple):
    """The run tag that its library reads, what a run that scores asks for there by default, and the library's own
    verdict on what is asked for (it raises)."""

    tag: str
    scoring: Mapping[str, Any]
    validate: Callable[[dict[str, Any]], None]
    extra: str


_LAUNCHERS = {
    "ray": _Launcher("dagster-ray/config", {"num_gpus": 1}, _ray, "ray"),
    "kubernetes": _Launcher(
        "dagster-k8s/config",
        {"container_config": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}},
        _kubernetes,
        "k8s",
    ),
}


@dataclass(frozen=True)
class Cluster:
    """What definitions are made with where runs are launched elsewhere: tags of runs that score, and the executor."""

    scoring: Mapping[str, str]
    executor: dg.ExecutorDefinition = dg.in_process_executor

    @classmethod
    def from_environment(cls) -> "Cluster | None":
        """SANDHI_CLUSTER (`ray`, `kubernetes`, or nothing: this machine), and SANDHI_SCORING: what a run that scores
        asks for, as JSON in the words of the launcher's library (by default one GPU; `{}`: no more than other runs).

        Raises UsageError for another name, beside SANDHI_DEVICES, where the library is not installed, and where it does
        not take what is asked for.
        """
        name = os.environ.get(CLUSTER, "")
        if not name:
            return None
        if name not in _LAUNCHERS:
            raise UsageError(
                f"{CLUSTER} is {name!r}", remedy=f"set it to one of {', '.join(sorted(_LAUNCHERS))}, or not at all"
            )
        if os.environ.get("SANDHI_DEVICES"):
            raise UsageError(
                f"SANDHI_DEVICES names devices of one machine, and {CLUSTER} is {name!r}",
                remedy="unset it: the launcher gives each run its own device",
            )
        launcher = _LAUNCHERS[name]
        needs = _asked(os.environ.get(NEEDS, ""), launcher.scoring)
        try:
            launcher.validate(needs)
        except ImportError as error:
            raise UsageError(
                f"{CLUSTER} is {name!r}, and its library is not installed: {error}",
                remedy=f"pip install -c constraints.txt --editable '.[pipeline,{launcher.extra}]'",
            ) from error
        except dg.DagsterInvalidConfigError as error:
            raise _refused("; ".join(e.message for e in error.errors)) from error
        except Exception as error:  # dagster-k8s raises it bare
            raise _refused(str(error)) from error
        return cls({launcher.tag: json.dumps(needs, sort_keys=True)} if needs else {})


def _asked(text: str, default: Mapping[str, Any]) -> dict[str, Any]:
    if not text:
        return dict(default)
    try:
        needs = json.loads(text)
    except ValueError as error:
        raise _refused(f"it is no JSON: {error}") from error
    if not isinstance(needs, dict):
        raise _refused("it is no JSON object")
    return needs


def _refused(why: str) -> UsageError:
    return UsageError(
        f"{NEEDS} is not what a run can ask for: {' '.join(why.split())}",
        remedy="see docs/scale.md for what each launcher takes",
    )
