"""Kubernetes manifests: a Deployment and a Service a member, the export a read-only volume of all, on one node.

Pods of one node that read the same files have their pages once; on two nodes nothing is shared, hence the affinity.
Fields as of Kubernetes 1.25 and later.
"""

from typing import Any

from sandhi_core.deploy.launch import PYTHON
from sandhi_core.serving.members import Deployed, Member
from sandhi_core.serving.processes import QUIET
from sandhi_core.serving.render import containers
from sandhi_core.serving.render.containers import Target
from sandhi_core.serving.render.text import yaml_bytes

HEAD = (
    "Servers of a pool on one node. Memory is for weights on the CPU; there --kv-cache-memory-bytes is more.",
    "kubectl apply -f kubernetes.yaml",
)
_PERIOD = 10  # seconds between two probes


def kubernetes(deployed: Deployed, members: tuple[Member, ...], target: Target) -> bytes:
    memory = containers.memory_bytes(deployed, members)
    documents: list[dict[str, Any]] = []
    before: Member | None = None
    for member in members:
        documents += [_deployment(deployed, member, target, memory[member.name], before), _service(deployed, member)]
        before = member
    return yaml_bytes(*documents, head=HEAD)


def _labels(deployed: Deployed, member: Member | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "sandhi", "app.kubernetes.io/part-of": deployed.spec.pool[:63].rstrip("-_")}
    return labels | ({"app.kubernetes.io/instance": member.host_name} if member else {})


def _deployment(
    deployed: Deployed, member: Member, target: Target, memory: int, before: Member | None
) -> dict[str, Any]:
    annotations = {"sandhi/manifest": deployed.manifest.digest}
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(member.port)}
    if member.metrics:
        annotations |= scraped | {"prometheus.io/path": member.metrics}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": member.host_name, "labels": _labels(deployed, member)},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # two at once would hold private weights twice
            "selector": {"matchLabels": _labels(deployed, member)},
            "template": {
                "metadata": {"labels": _labels(deployed, member), "annotations": annotations},
                "spec": _pod(deployed, member, target, memory, before),
            },
        },
    }


def _pod(deployed: Deployed, member: Member, target: Target, memory: int, before: Member | None) -> dict[str, Any]:
    together = {"labelSelector": {"matchLabels": _labels(deployed)}, "topologyKey": "kubernetes.io/hostname"}
    pod: dict[str, Any] = {
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [together]}},
        "terminationGracePeriodSeconds": containers.STOP_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a member called vllm would set VLLM_PORT, which vLLM reads
    }
    if before is not None:
        pod["initContainers"] = [{"name": "after", "image": target.image, "command": _waiting(before)}]
    return pod | {
        "containers": [_container(member, target, memory)],
        "volumes": [{"name": "export", **_volume(deployed, target)}],
    }


def _waiting(before: Member) -> list[str]:
    """Waits for the member before; after READY_SECONDS its failure is its own, and this one starts."""
    url = f"http://{before.host_name}:{before.port}/health"
    program = (
        "import time, urllib.request\n"
        f"end = time.monotonic() + {containers.READY_SECONDS}\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        f"        urllib.request.urlopen('{url}', timeout=5)\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(2)\n"
    )
    return [PYTHON, "-c", program]


def _container(member: Member, target: Target, memory: int) -> dict[str, Any]:
    healthy = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PERIOD, "timeoutSeconds": 5}
    mount = {"name": "export", "mountPath": str(containers.EXPORT), "readOnly": True}
    if target.claim and target.path:
        mount["subPath"] = target.path
    return {
        "name": "server",
        "image": target.image,
        "command": containers.command(member),
        "workingDir": str(containers.EXPORT),
        "env": [{"name": name, "value": value} for name, value in QUIET.items()],
        "ports": [{"name": "http", "containerPort": member.port}],
        "resources": {"requests": {"memory": str(memory)}},
        "startupProbe": healthy | {"failureThreshold": containers.READY_SECONDS // _PERIOD},
        "readinessProbe": dict(healthy),
        "livenessProbe": healthy | {"failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [mount],
    }


def _volume(deployed: Deployed, target: Target) -> dict[str, Any]:
    if target.claim:
        return {"persistentVolumeClaim": {"claimName": target.claim, "readOnly": True}}
    return {"hostPath": {"path": containers.source(deployed, target), "type": "Directory"}}


def _service(deployed: Deployed, member: Member) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": member.host_name, "labels": _labels(deployed, member)},
        "spec": {
            "selector": _labels(deployed, member),
            "ports": [{"name": "http", "port": member.port, "targetPort": "http"}],
        },
    }
