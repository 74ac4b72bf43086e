"""What serving commands print for people, by plain text alone: tables of rich are for where pools are built."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any


def planned(document: Mapping[str, Any]) -> str:
    """Commands in starting order, each a line for a shell, below a comment with its address."""
    lines = []
    for owner in document["owners"]:
        lines += [f"# owner of shared tensors on a GPU: {owner['socket']}", shlex.join(owner["command"])]
    for server in document["servers"]:
        lines += [f"# {', '.join(server['models'])}: {server['url']}", _line(server)]
    return "".join(f"{line}\n" for line in lines)


def _line(server: Mapping[str, Any]) -> str:
    """`env` rather than assignments before the command, which not every shell has. A program with a `=` in its path
    would be an assignment to `env`: then a shell starts it."""
    variables = (f"{name}={value}" for name, value in server["environment"].items())
    through = ("sh", "-c", 'exec "$0" "$@"') if "=" in server["command"][0] else ()
    return f"cd {shlex.quote(server['directory'])} && {shlex.join(['env', *variables, *through, *server['command']])}"


def served(document: Mapping[str, Any]) -> str:
    """Where the servers are, what Prometheus reads, and what the export's files take in memory."""
    lines = [f"Pool {document['pool']} is served from {document['export']}", ""]
    for server in document["servers"]:
        lines += _server(server)
    memory = document["memory"]
    lines += [f"in all   {_size(memory['pss'])} of the export's files, {_size(memory['rss'])} if none was shared"]
    if document["proxy"]:
        lines += [f"all models at {document['proxy']}"]
    return "".join(f"{line}\n" for line in [*lines, "Ctrl-C stops all servers"])


def _server(server: Mapping[str, Any]) -> Iterator[str]:
    memory = server["memory"]
    yield f"{server['name']}  {server['url']}  ({server['engine']}, ready after {server['seconds']} s)"
    if server["models"] != [server["name"]]:
        yield f"  models   {', '.join(server['models'])}"
    if server["metrics"]:
        yield f"  metrics  {server['metrics']}"
    yield f"  memory   {_size(memory['pss'])} of the export's files, {_size(memory['rss'])} if none was shared"
    yield ""


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
