"""All stages, in the order in which they run: what the graph and its checks say of them.

What a stage computes is in the module of its name.
"""

from collections.abc import Mapping

from assets.stage import StageAsset

CHECKS: Mapping[str, str] = {
    "exported_is_scored": "The files hold the very bytes that were scored, answer as they did, and save what is "
    "claimed. Nothing is deployed otherwise.",
    "within_budget": "Every model's deployed weights keep its budgets on questions never used before.",
    "certified": "Every model's deployed weights keep its budgets at 95 % confidence, at every "
    "cutoff that was tried. Where the pool asks for no more than the measured change, this is a warning.",
    "bytes_on_disk": "The exported files take as many bytes less than the checkpoints as is claimed.",
    "bytes_in_memory": "Processes that load the export share, and take less than those of the originals by, nine "
    "tenths of what is claimed, less the pages that are mapped whole.",
    "measured_as_deployed": "Memory was measured with the engine that the pool is deployed on.",
}

_STAGES = (
    StageAsset(
        name="checkpoint",
        phase="models",
        description="Fingerprint of a model's checkpoint: digest and statistics of every tensor, digest of every file.",
        kinds=frozenset({"huggingface", "safetensors"}),
    ),
    StageAsset(
        name="profile",
        phase="models",
        description="Baseline, and the score with noise in each layer's attention or MLP, on the profile split.",
        scores=True,
        kinds=frozenset({"lm-eval", "pytorch"}),
    ),
    StageAsset(
        name="groups",
        phase="search",
        description="Groups of slots that may share one tensor, with the recipe of that tensor, in search order.",
        scores=True,
        kinds=frozenset({"scipy"}),
    ),
    StageAsset(
        name="plan",
        phase="search",
        description="The steps of one model's search, each with the recipes it applies.",
    ),
    StageAsset(
        name="trajectory",
        phase="search",
        description="What one model may share: applied, scored on the search split, kept or not.",
        scores=True,
        kinds=frozenset({"lm-eval", "pytorch"}),
    ),
    StageAsset(
        name="cutoffs",
        phase="search",
        description="Every scored cutoff of one model, which of them are within budget, the deepest, the knee.",
    ),
    StageAsset(
        name="holdout",
        phase="search",
        description="Cutoffs tried from safe to bold on the holdout split; the last that stays within budget.",
        scores=True,
        kinds=frozenset({"lm-eval", "pytorch"}),
    ),
    StageAsset(
        name="operating_points",
        phase="serving",
        description="Operating points of the pool with savings and drops, their Pareto frontier, the one to deploy.",
    ),
    StageAsset(
        name="merged_weights",
        phase="serving",
        description="Exported checkpoints of the deployed point; shared tensors are links to one file.",
        kinds=frozenset({"huggingface", "safetensors"}),
    ),
    StageAsset(
        name="sharing_proof",
        phase="serving",
        description="Exported tensors are compared with what was scored; bytes shared, on disk and in memory.",
        checks=CHECKS,
        scores=True,
        kinds=frozenset({"lm-eval", "safetensors"}),
    ),
    StageAsset(
        name="deployment",
        phase="serving",
        description="Deployment specification with commands and memory figures; exists only where the proof passed.",
    ),
)

STAGE_ASSETS: Mapping[str, StageAsset] = {stage.name: stage for stage in _STAGES}
