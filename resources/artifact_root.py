"""Where everything is kept: the artifact root, as a Dagster resource."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from sandhi_core.artifacts import Artifacts
from sandhi_core.garbage.using import used


class ArtifactRoot(dg.ConfigurableResource):  # type: ignore[type-arg]
    """One directory holds all records, scores, shared tensors and exports."""

    path: str

    def artifacts(self) -> Artifacts:
        return Artifacts(Path(self.path))

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Generator["ArtifactRoot", None, None]:
        """For as long as a stage runs nothing is removed from the root."""
        with used(self.artifacts()):
            yield self
