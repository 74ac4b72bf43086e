"""The recorded proposals, from the recorded statistics: the same groups, and every model's order."""

from sandhi_core.grouping.groups import make_groups
from sandhi_core.grouping.order import reference_order
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Groups
from tests.conformance.candidates import Block, RecordedClustering
from tests.conformance.recorded import slug

MIDDLE = 15.5  # the reference's, whatever the number of layers


def grouped(clustering: RecordedClustering) -> Groups:
    settings = GroupingSettings(candidates="reference")
    return make_groups(
        "pool", "key", clustering.fingerprints, clustering.profiles, settings, MergingSettings(), 0.0, None
    )


def test_groups(clustered: RecordedClustering) -> None:
    found = {
        (g.stage, g.recipe.projection, tuple((c.model, c.layer) for c in g.recipe.contributors))
        for g in grouped(clustered).groups
    }
    assert found == clustered.recorded()


def test_order(clustering: RecordedClustering) -> None:
    groups = clustering.groups() if clustering.statistics is None else grouped(clustering).groups
    for label in clustering.proposals:
        ours: list[Block] = [
            (
                block[0][0].stage,
                block[0][1].component,
                block[0][1].layer,
                frozenset(g.recipe.projection for g, _ in block),
            )
            for block in reference_order(groups, slug(label), MIDDLE)
        ]
        assert ours == clustering.blocks(label), label
