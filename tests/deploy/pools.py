"""A proved export of three models, small enough to check every figure by hand."""

from pathlib import Path
from typing import Any

from sandhi_core.pools.pool import DeploySettings, Engine, ModelEntry, Pool, TaskBudget
from sandhi_core.records import (
    ExportedModel,
    ExportedTensor,
    Fingerprint,
    HoldoutScore,
    HoldoutTask,
    Look,
    Manifest,
    MemoryComparison,
    OperatingPoint,
    OperatingPoints,
    Savings,
    SharingProof,
)

KB = 1000
DEVICE = 1000 * KB
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
TOKEN = 2 * 2 * 1 * 4 * 2  # bytes of a token's keys and values: layers 2, kv heads 1, head size 4, bfloat16


def tensor(digest: str, kb: int, sharing: str) -> ExportedTensor:
    file = "private.safetensors" if sharing == "private" else f"shared-{digest}-0.safetensors"
    return ExportedTensor.model_validate(
        {
            "digest": digest,
            "dtype": "BF16",
            "shape": (kb * 500,),
            "nbytes": kb * KB,
            "file": file,
            "sharing": sharing,
        }
    )


def exported(name: str, tensors: dict[str, ExportedTensor]) -> ExportedModel:
    return ExportedModel(directory=name, weights=f"w-{name}", files={}, tensors=tensors, linked="hardlink")


MANIFEST = Manifest(
    pool="p",
    point="deployed",
    models={
        # a: 190 kB, b: 200 kB, c: 130 kB; together 520, shared ones held once 520 - 2 * 30 - 80 = 380
        "a": exported(
            "a",
            {
                "embed": tensor("e", 30, "duplicate"),
                "up": tensor("u", 80, "merged"),
                "down": tensor("da", 80, "private"),
            },
        ),
        "b": exported(
            "b",
            {
                "embed": tensor("e", 30, "duplicate"),
                "up": tensor("u", 80, "merged"),
                "down": tensor("db", 90, "private"),
            },
        ),
        "c": exported("c", {"embed": tensor("e", 30, "duplicate"), "up": tensor("uc", 100, "private")}),
    },
)


def pool(device: str = "1MB", plugin: bool = False, **engines: Engine) -> Pool:
    """`engines`: of models that have their own."""
    tasks = (TaskBudget(task="t", metric="acc", budget=0.02),)
    models = tuple(ModelEntry(name=name, path=f"org/{name}", tasks=tasks, engine=engines.get(name)) for name in "abc")
    return Pool(name="p", models=models, deploy=DeploySettings(device_memory=device, plugin=plugin))


def proof(**changes: Any) -> SharingProof:
    passed = SharingProof(
        pool="p",
        export="exports/p/0",
        manifest=MANIFEST.digest,
        passed=True,
        problems=(),
        tensors_checked=8,
        questions_checked=dict.fromkeys("abc", 40),
        questions_equal=dict.fromkeys("abc", 40),
        checkpoint_bytes=520 * KB,
        duplicates=60 * KB,
        claimed=140 * KB,
        verified_disk=139 * KB,
        verified_memory=135 * KB,
        memory=MemoryComparison(engine="transformers", originals=(), exports=(), shared=135 * KB, saved=135 * KB),
    )
    return passed.model_copy(update=changes)


def holdout(name: str) -> HoldoutScore:
    task = HoldoutTask(
        metric="acc",
        budget=0.02,
        original=0.9,
        merged=0.89,
        difference=-0.01,
        low=-0.03,
        high=0.01,
        bound=-0.025,
        questions=400,
        within_budget=True,
        certified=False,
        certifiable=0.0067,
    )
    none = {"merged": 0.9, "difference": 0.0, "low": 0.0, "high": 0.0, "bound": 0.0, "certified": True}
    unchanged = {"t": task.model_copy(update=none)}
    look = Look(steps=3, within_budget=True, weights=f"w-{name}", tasks={"t": task})
    return HoldoutScore(
        pool="p",
        model=name,
        steps=look.steps,
        weights=look.weights,
        tasks=look.tasks,
        original=Look(steps=0, within_budget=True, weights=f"o-{name}", tasks=unchanged),
        walked=(look,),
    )


def fingerprint(name: str, dtype: str = "BF16") -> Fingerprint:
    return Fingerprint(
        model=name,
        model_type="llama",
        layers=2,
        dtype=dtype,
        files={},
        tensors=(),
        slots=(),
        private=(),
        rows="r",
    )


SAVINGS = Savings(checkpoint_bytes=520 * KB, resident_bytes=520 * KB, duplicates=60 * KB, freed=140 * KB, overhead=0)
DEPLOYED = OperatingPoint(
    name="deployed",
    criterion="holdout",
    cutoffs=dict.fromkeys("abc", 3),
    drops=dict.fromkeys("abc", 0.01),
    savings=SAVINGS,
)
POINTS = OperatingPoints(pool="p", points=(), frontier=(), deployed=DEPLOYED, alignment=4096)


def arguments(**changes: Any) -> dict[str, Any]:
    """Everything that `deployment_spec` takes."""
    return {
        "pool": pool(),
        "manifest": MANIFEST,
        "export_root": Path("/srv/exports/p q"),
        "configs": dict.fromkeys("abc", CONFIG),
        "proof": proof(),
        "holdouts": {name: holdout(name) for name in "abc"},
        "points": POINTS,
        "fingerprints": {name: fingerprint(name) for name in "abc"},
    } | changes
