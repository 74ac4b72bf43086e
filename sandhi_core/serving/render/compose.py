"""A Compose file (compose-spec): one service a member, the export a read-only bind mount of all."""

from typing import Any

from sandhi_core.serving.members import Deployed, Member
from sandhi_core.serving.processes import QUIET
from sandhi_core.serving.render import containers
from sandhi_core.serving.render.containers import Target
from sandhi_core.serving.render.text import yaml_bytes

HEAD = (
    "Servers of a pool, one after the other. Memory is for weights on the CPU; there --kv-cache-memory-bytes is more.",
    "docker compose -f compose.yaml up --detach --wait",
)


def compose(deployed: Deployed, members: tuple[Member, ...], target: Target) -> bytes:
    memory = containers.memory_bytes(deployed, members)
    services: dict[str, Any] = {}
    before: str | None = None
    for member in members:
        services[member.host_name] = _service(deployed, member, target, memory[member.name], before)
        before = member.host_name
    name = f"sandhi-{deployed.spec.pool.lower()}"
    return yaml_bytes(_literal({"name": name, "services": services}), head=HEAD)


def _literal(value: Any) -> Any:
    """Compose would put variables in place of what follows a `$`."""
    match value:
        case str():
            return value.replace("$", "$$")
        case dict():
            return {key: _literal(of) for key, of in value.items()}
        case list():
            return [_literal(of) for of in value]
    return value


def _service(deployed: Deployed, member: Member, target: Target, memory: int, before: str | None) -> dict[str, Any]:
    health = containers.healthy(f"http://127.0.0.1:{member.port}/health")
    labels = {"sandhi.pool": deployed.spec.pool, "sandhi.manifest": deployed.manifest.digest}
    if member.metrics:
        labels |= {"prometheus.io/scrape": "true", "prometheus.io/port": str(member.port)}
        labels |= {"prometheus.io/path": member.metrics}
    mount: dict[str, Any] = {
        "type": "bind",
        "source": containers.source(deployed, target),
        "target": str(containers.EXPORT),
        "read_only": True,
        # Else Docker is given `source:target:ro`, which no path with a colon fits; and what is not there it would make.
        "bind": {"create_host_path": False},
    }
    service: dict[str, Any] = {
        "image": target.image,
        "entrypoint": containers.command(member),
        "working_dir": str(containers.EXPORT),
        "environment": dict(QUIET),
        "volumes": [mount],
        # Servers ask for no key: whoever is to reach them from elsewhere is let in knowingly (docs/serving.md).
        "ports": [f"127.0.0.1:{member.port}:{member.port}"],
        "healthcheck": {
            "test": ["CMD", *health],
            "interval": "10s",
            "timeout": "10s",
            "retries": 6,
            "start_period": f"{containers.READY_SECONDS}s",
        },
        "mem_reservation": memory,
        "stop_grace_period": f"{containers.STOP_SECONDS}s",
        "restart": "unless-stopped",
        "labels": labels,
    }
    if before is not None:
        service["depends_on"] = {before: {"condition": "service_healthy"}}
    return service
