"""The code location that Dagster loads (workspace.yaml): the pools of SANDHI_POOLS in the root of SANDHI_HOME,
run where SANDHI_CLUSTER says. A pool file that cannot be used is left out, and told of on standard error."""

import sys

from pipelines.assembly import build_definitions
from pipelines.cluster import Cluster
from pipelines.settings import Settings
from sandhi_core.catalogue import load_usable

_settings = Settings.from_environment()
_catalogue, _refused = load_usable(_settings.pool_files(), _settings.placed)
for _error in _refused:
    print(f"left out: {_error}", file=sys.stderr)
defs = build_definitions(_catalogue, _settings, cluster=Cluster.from_environment())
