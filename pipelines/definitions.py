"""The code location that Dagster loads (workspace.yaml): the pools of SANDHI_POOLS in the root of SANDHI_HOME,
run where SANDHI_CLUSTER says."""

from pipelines.assembly import build_definitions
from pipelines.cluster import Cluster
from pipelines.settings import Settings
from sandhi_core.catalogue import load_catalogue

_settings = Settings.from_environment()
defs = build_definitions(load_catalogue(_settings.pool_files()), _settings, cluster=Cluster.from_environment())
