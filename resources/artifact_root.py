"""Where everything is kept: the artifact root, as a Dagster resource."""

from pathlib import Path

import dagster as dg

from sandhi_core.artifacts import Artifacts


class ArtifactRoot(dg.ConfigurableResource):  # type: ignore[type-arg]
    """One directory holds all records, scores, shared tensors and exports."""

    path: str

    def artifacts(self) -> Artifacts:
        return Artifacts(Path(self.path))
