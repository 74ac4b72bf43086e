"""docs/upgrading.md names the versions that this checkout has."""

import re

from sandhi_core.checkpoints import scan
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.evaluation.conditions import SCORING_VERSION
from sandhi_core.graph import STAGES
from sandhi_core.layout import SCHEMA_VERSION
from sandhi_core.rungs.allotment import LADDER_VERSION
from tests.conftest import CHECKOUT

DOCUMENT = (CHECKOUT / "docs" / "upgrading.md").read_text()


def row(first: str) -> str:
    """The second cell of the table's row that begins so."""
    (found,) = re.findall(rf"^\| {re.escape(first)}[^|]*\| (\d+) \|", DOCUMENT, re.MULTILINE)
    return str(found)


def test_every_stage_is_named_with_its_version() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", DOCUMENT, re.MULTILINE)
    assert listed == [(name, str(stage.version)) for name, stage in STAGES.items()]


def test_so_are_the_versions_of_what_is_kept_beside() -> None:
    assert row("scoring (`SCORING_VERSION`)") == str(SCORING_VERSION)
    assert row("ladders (`LADDER_VERSION`)") == str(LADDER_VERSION)
    assert row("scans of weight files") == str(scan.VERSION)


def test_so_are_the_schemas_of_exports() -> None:
    assert row("`sandhi.json` (manifest)") == str(SCHEMA_VERSION)
    assert row("`deployment.json`") == str(DeploymentSpec.model_fields["schema_version"].default)
