"""The workflow: Dagster definitions, and the command line that runs the same jobs."""

from sandhi_core.offline import work_offline

work_offline()
