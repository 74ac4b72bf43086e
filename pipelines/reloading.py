"""When the code location must be loaded anew, and how: partitions and schedules come from pool files as it loads."""

import json
from collections.abc import Collection
from dataclasses import replace
from urllib.request import Request, urlopen

from sandhi_core.graph import STAGES, Catalogue
from sandhi_core.records import digest_of

BY_HAND = "reload it: in the UI under Deployment, Code locations"
TIMEOUT = 120.0  # seconds; loading imports torch
PATIENCE = 120.0  # seconds that the daemon may take to see what the webserver reloaded
RELOADED = "the code location is reloaded"

_RELOAD = """
mutation ($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) {
    __typename
    ... on WorkspaceLocationEntry { locationOrLoadError { __typename ... on PythonError { message } } }
    ... on PythonError { message }
  }
}
"""


def outdated(loaded: Catalogue, current: Catalogue, *, missing: bool = False) -> str | None:
    """Names what is to be loaded, where pool files name other pools, models or times of rebuilding than those that were
    loaded. Where some cannot be read now, pools that are `missing` may be theirs; where a model cannot, its pool's
    groups may be as they were."""
    if missing:
        loaded = replace(loaded, pools={name: pool for name, pool in loaded.pools.items() if name in current.pools})
    unsettled = {name for name in current.pools if current.unreadable(name)}
    wanted = _loaded(current, unsettled)
    return None if _loaded(loaded, unsettled) == wanted else digest_of(wanted)


def _loaded(catalogue: Catalogue, unsettled: Collection[str]) -> tuple[list[list[str]], dict[str, str | None]]:
    keys = [
        [k for k in catalogue.keys(stage.scope) if stage.scope != "group" or k.partition(".")[0] not in unsettled]
        for stage in STAGES.values()
    ]
    return keys, {name: pool.rebuild for name, pool in catalogue.pools.items()}


def reload_location(webserver: str, name: str) -> str:
    """Have the webserver at this address load the code location anew; says what came of it."""
    asked = json.dumps({"query": _RELOAD, "variables": {"name": name}}).encode()
    request = Request(f"{webserver.rstrip('/')}/graphql", asked, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=TIMEOUT) as reply:
            found = json.load(reply)["data"]["reloadRepositoryLocation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the webserver at {webserver} did not reload the code location ({error}): {BY_HAND}"
    result = found.get("locationOrLoadError") or found
    if result["__typename"] != "RepositoryLocation":
        said = result.get("message", result["__typename"]).strip()
        return f"the webserver at {webserver} could not reload the code location ({said}): {BY_HAND}"
    return RELOADED
