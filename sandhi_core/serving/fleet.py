"""A pool's servers, started in order, watched, and stopped together: `sandhi serve`."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandhi_core.errors import ServingError, UsageError
from sandhi_core.memory import Holder, WeightFiles, accounts, holder, weight_files
from sandhi_core.serving.completions import PATH, fetch
from sandhi_core.serving.gpu import OwnerProcess, owners
from sandhi_core.serving.members import Deployed, Member
from sandhi_core.serving.processes import GRACE, QUIET, Server, require_free, shown_host, stop_all
from sandhi_core.serving.render.litellm import proxy_config

PROXY = "litellm.proxy.proxy_cli"
KEY = "LITELLM_MASTER_KEY"
"""The environment variable with the key that LiteLLM's proxy asks of requests; without one it does not start."""
_LOOK = 0.5  # seconds between two looks at whether all are alive
_ASKING = 30.0  # seconds for the list of a server's models


@dataclass(frozen=True)
class Settings:
    """How servers are run. `python`: of the engine's environment; `proxy`: of that with LiteLLM, None for no proxy;
    `logs`: where logs are kept, by default a folder that goes with a clean end. Seconds, and a port."""

    python: str
    host: str = "127.0.0.1"
    proxy: str | None = None
    proxy_port: int = 4000
    ready_timeout: float = 900.0
    grace: float = GRACE
    logs: Path | None = None


@dataclass
class Fleet:
    """The servers that run, by the name of their member, the owners of GPUs behind and the proxy before them."""

    deployed: Deployed
    settings: Settings
    servers: dict[str, Server] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    owners: list[Server] = field(default_factory=list)
    proxy: Server | None = None

    def start_owner(self, owner: OwnerProcess, log: Path) -> float:
        """Start what holds shared tensors on a GPU; returns the seconds until engines can attach. Raises
        ServingError."""
        server = Server.start(
            f"owner {owner.rank}",
            owner.command(self.deployed.root, self.settings.python),
            port=None,
            health=owner.socket,
            log=log,
            grace=self.settings.grace,
        )
        self.owners.append(server)
        return server.wait_ready(self.settings.ready_timeout, self.require_alive)

    def start(self, member: Member, log: Path) -> None:
        """Start one server and wait until it is ready. Raises ServingError."""
        settings = self.settings
        server = Server.start(
            member.name,
            member.command(self.deployed.root, python=settings.python, host=settings.host),
            port=member.port,
            log=log,
            host=settings.host,
            directory=self.deployed.root,
            environment=QUIET,
            grace=settings.grace,
        )
        self.servers[member.name], self.members[member.name] = server, member
        self.seconds[member.name] = server.wait_ready(settings.ready_timeout, self.require_alive)
        if member.engine == "vllm":
            _require_models(server, member)
        else:
            _require_answer(server, member, settings.ready_timeout)

    def start_proxy(self, log: Path) -> None:
        """Start LiteLLM's proxy before the servers. Raises ServingError."""
        settings = self.settings
        assert settings.proxy is not None
        config = log.with_suffix(".yaml")
        config.write_bytes(proxy_config(tuple(self.members.values()), shown_host(settings.host)))
        address = ("--host", settings.host, "--port", str(settings.proxy_port))
        # On this machine alone it admits whom the servers behind it admit; elsewhere `running` has asked for a key.
        open_here = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"} if _local(settings.host) else {}
        self.proxy = Server.start(
            "proxy",
            (settings.proxy, "-m", PROXY, "--config", str(config), *address),
            port=settings.proxy_port,
            log=log,
            host=settings.host,
            health="/health/liveliness",
            environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"} | ({} if os.environ.get(KEY) else open_here),
            grace=settings.grace,
        )
        self.seconds["proxy"] = self.proxy.wait_ready(settings.ready_timeout, self.require_alive)

    def all(self) -> Iterator[Server]:
        yield from self.owners
        yield from self.servers.values()
        if self.proxy is not None:
            yield self.proxy

    def require_alive(self) -> None:
        """Raises ServingError for the first server that has ended, with the end of its log."""
        for server in self.all():
            server.require_alive()

    def stop(self) -> None:
        stop_all(self.all())

    def document(self) -> dict[str, Any]:
        """What `--json` prints once all are ready (docs/cli.md)."""
        taken = self._taken()
        return {
            "ok": True,
            "problems": [],
            "export": str(self.deployed.root),
            "manifest": self.deployed.manifest.digest,
            "pool": self.deployed.spec.pool,
            "owners": [{"socket": o.url, "log": str(o.log), "pids": list(o.pids())} for o in self.owners],
            "servers": [self._row(member, taken[name]) for name, member in self.members.items()],
            "memory": {part: sum(of[part] for of in taken.values()) for part in ("rss", "pss")},
            "proxy": None if self.proxy is None else f"{self.proxy.url}/v1",
        }

    def _row(self, member: Member, taken: Mapping[str, int]) -> dict[str, Any]:
        server = self.servers[member.name]
        return {
            "name": member.name,
            "models": list(member.models),
            "engine": member.engine,
            "url": f"{server.url}/v1",
            "health": f"{server.url}/health",
            "metrics": member.metrics and server.url + member.metrics,
            "log": str(server.log),
            "pids": list(server.pids()),
            "seconds": round(self.seconds[member.name], 1),
            "memory": dict(taken),
        }

    def _taken(self) -> dict[str, dict[str, int]]:
        """Bytes of the export's weight files that each server's processes have in memory, by member: `rss` counts a
        page once for each process, `pss` once for all of these processes."""
        models = self.deployed.manifest.models.values()
        files = weight_files(*(self.deployed.root / model.directory for model in models))
        held = [(name, found) for name, server in self.servers.items() for found in _holders(server, files)]
        taken = {name: {"rss": 0, "pss": 0} for name in self.servers}
        for (name, _), process in zip(held, accounts([found for _, found in held]), strict=True):
            taken[name]["rss"] += process.rss
            taken[name]["pss"] += process.pss
        return taken


@contextmanager
def running(
    deployed: Deployed, members: Sequence[Member], settings: Settings, say: Callable[[str], None]
) -> Iterator[Fleet]:
    """The servers of `members`, all ready, until the block ends, whichever way. `say` is told what goes on.

    Raises UsageError for a Python that is not there, or a port that is none or a server's already, and ServingError
    where one is taken, before anything starts; ServingError also where a server does not come up.
    """
    for member in members:
        require_free(member.name, settings.host, member.port)
    if settings.proxy is not None:
        _require_proxy_port(members, settings.proxy_port)
        require_free("proxy", settings.host, settings.proxy_port)
        if not _local(settings.host) and not os.environ.get(KEY):
            message = f"the proxy would admit everybody who reaches {settings.host}"
            raise UsageError(message, remedy=f"set {KEY} to a secret that requests must bring, or listen on 127.0.0.1")
    with ExitStack() as stack:
        logs = stack.enter_context(_logs(settings.logs))
        fleet = Fleet(deployed, settings)
        stack.callback(fleet.stop)
        for owner in _owners(members):
            say(f"starting the owner of shared tensors on GPU {owner.rank}")
            seconds = fleet.start_owner(owner, logs / f"owner-{owner.rank}.log")
            say(f"it is ready after {seconds:.0f} s")
        for place, member in enumerate(members, 1):
            say(f"starting {member.name} ({place} of {len(members)}, {member.engine}) on port {member.port}")
            fleet.start(member, logs / f"{member.name}.log")
            say(f"{member.name} is ready after {fleet.seconds[member.name]:.0f} s")
        if settings.proxy is not None:
            say(f"starting the proxy on port {settings.proxy_port}")
            fleet.start_proxy(logs / "proxy.log")
        yield fleet


def watch(fleet: Fleet) -> None:
    """Until a server ends, of which it raises ServingError, or an exception such as KeyboardInterrupt comes."""
    while True:
        fleet.require_alive()
        time.sleep(_LOOK)


def commands(deployed: Deployed, members: Sequence[Member], settings: Settings) -> dict[str, Any]:
    """What `--dry-run --json` prints: what would be started, in order."""
    url = f"http://{shown_host(settings.host)}"
    return {
        "ok": True,
        "problems": [],
        "export": str(deployed.root),
        "manifest": deployed.manifest.digest,
        "pool": deployed.spec.pool,
        "owners": [
            {"socket": f"unix:{owner.socket}", "command": list(owner.command(deployed.root, settings.python))}
            for owner in _owners(members)
        ],
        "servers": [
            {
                "name": member.name,
                "models": list(member.models),
                "engine": member.engine,
                "url": f"{url}:{member.port}/v1",
                "health": f"{url}:{member.port}/health",
                "metrics": member.metrics and f"{url}:{member.port}{member.metrics}",
                "directory": str(deployed.root),
                "environment": dict(QUIET),
                "command": list(member.command(deployed.root, python=settings.python, host=settings.host)),
            }
            for member in members
        ],
        "proxy": None if settings.proxy is None else f"{url}:{settings.proxy_port}/v1",
    }


def _owners(members: Sequence[Member]) -> list[OwnerProcess]:
    """One for each rank, where a member needs them: all of an export go by the same."""
    needed = {(member.owner, member.ranks) for member in members if member.owner is not None}
    return [owner for path, ranks in sorted(needed) for owner in owners(path, ranks)]


def _require_proxy_port(members: Sequence[Member], port: int) -> None:
    if not 0 < port <= 65535:
        raise UsageError(f"--proxy-port {port} is no port", remedy="choose one from 1 to 65535")
    if name := next((member.name for member in members if member.port == port), None):
        raise UsageError(f"--proxy-port {port} is the port of {name}", remedy="choose another, or another --port-base")


def _local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@contextmanager
def _logs(kept: Path | None) -> Iterator[Path]:
    """Where logs go. A folder of our own stays where something failed: the error names a file in it."""
    if kept is not None:
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--logs {kept}: {error.strerror}", remedy="name a directory") from None
        yield kept
        return
    own = Path(tempfile.mkdtemp(prefix="sandhi-serve-"))
    try:
        yield own
    except Exception:
        raise
    except BaseException:
        shutil.rmtree(own)
        raise
    shutil.rmtree(own)


def _require_models(server: Server, member: Member) -> None:
    """Raises ServingError unless it is our server that answers on the port."""
    try:
        found = {model["id"] for model in json.loads(server.get("/v1/models", _ASKING))["data"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = {f"nothing readable ({error})"}
    if missing := set(member.models) - found:
        raise ServingError(
            f"{server.url} does not answer for {', '.join(sorted(missing))}, but for {', '.join(sorted(found))}",
            model=member.name,
            file=str(server.log),
            remedy="see its log; another server may have taken the port",
        )


def _require_answer(server: Server, member: Member, timeout: float) -> None:
    """Raises ServingError unless it answers by its model's name, within `timeout` seconds. What `transformers serve`
    lists is the cache of the hub, or an error without a network; a request for another model it refuses."""
    try:
        fetch(server.url + PATH, member.name, {"model": member.models[0], "prompt": "1", "max_tokens": 1}, timeout)
    except ServingError as error:
        error.amend(file=str(server.log))
        raise


def _holders(server: Server, files: WeightFiles) -> Iterator[Holder]:
    for pid in server.pids():
        with suppress(OSError):  # it has just ended
            yield holder(f"{server.name} {pid}", files, pid, 0)
