"""Fingerprints, profiles and evaluations made up from names, for tests of what never reads a weight."""

from collections.abc import Iterable, Mapping

from sandhi_core.records import (
    Component,
    Evaluation,
    Fingerprint,
    HoldoutScore,
    HoldoutTask,
    Look,
    OperatingPoint,
    OperatingPoints,
    Profile,
    Savings,
    Sensitivity,
    Slot,
    TaskResult,
    TensorInfo,
    digest_of,
)

PROJECTIONS: dict[str, Component] = {
    "q": "attn",
    "k": "attn",
    "v": "attn",
    "o": "attn",
    "gate": "mlp",
    "up": "mlp",
    "down": "mlp",
}
SHAPES = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
SHAPES |= {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}


def tensor(name: str, shape: tuple[int, ...], digest: str, mean: float = 0.0, std: float = 1.0) -> TensorInfo:
    nbytes = 2
    for n in shape:
        nbytes *= n
    return TensorInfo(
        name=name,
        file="model.safetensors",
        dtype="BF16",
        shape=shape,
        nbytes=nbytes,
        digest=digest,
        mean=mean,
        std=std,
        constant_rows=0,
    )


def fingerprint(
    model: str,
    layers: int = 4,
    *,
    width: str = "narrow",
    version: int = 0,
    bytes_of: Mapping[tuple[int, str], str] | None = None,
    stats: Mapping[tuple[int, str], tuple[float, float]] | None = None,
) -> Fingerprint:
    """A model with all its own bytes, but those given in `bytes_of` by (layer, projection). Keys agree
    between models of one `width`; `version` changes every byte."""
    tensors, slots = [tensor("model.embed_tokens.weight", (100, 64), digest_of([model, version]))], []
    for layer in range(layers):
        for projection, component in PROJECTIONS.items():
            name = f"model.layers.{layer}.{projection}_proj.weight"
            own = digest_of([model, version, layer, projection])
            digest = (bytes_of or {}).get((layer, projection), own)
            mean, std = (stats or {}).get((layer, projection), (0.0, 1.0))
            info = tensor(name, SHAPES[projection], digest, mean, std)
            tensors.append(info)
            slots.append(
                Slot(
                    model=model,
                    layer=layer,
                    projection=projection,
                    component=component,
                    tensor=name,
                    digest=digest,
                    nbytes=info.nbytes,
                    key=f"{width}-{projection}",
                )
            )
    return Fingerprint(
        model=model,
        model_type="llama",
        layers=layers,
        dtype="BF16",
        files={},
        tensors=tuple(sorted(tensors, key=lambda t: t.name)),
        slots=tuple(slots),
        private=(),
        rows="",
    )


def profile(model: str, layers: int = 4, drops: Mapping[tuple[str, int], float] | None = None) -> Profile:
    places: Iterable[tuple[Component, int]] = [(c, n) for n in range(layers) for c in ("attn", "mlp")]
    return Profile(
        model=model,
        fingerprint="",
        seeds=(1234,),
        questions={"task": 100},
        baseline={"task": 0.9},
        sensitivities=tuple(
            Sensitivity(layer=n, component=c, scores={"task": 0.9 - d}, drop=d)
            for c, n in places
            for d in [(drops or {}).get((c, n), 0.0)]
        ),
    )


def look(model: str, steps: int, difference: float) -> Look:
    """A model at a cutoff, on a holdout where it may lose two points."""
    within = difference >= -0.02
    task = HoldoutTask(
        metric="acc",
        budget=0.02,
        original=0.9,
        merged=0.9 + difference,
        difference=difference,
        low=difference - 0.02,
        high=difference + 0.02,
        bound=difference - 0.015,
        questions=400,
        within_budget=within,
        certified=difference >= -0.005,
        certifiable=0.0067,
    )
    return Look(steps=steps, within_budget=within, weights=f"{model}-{steps}", tasks={"task": task})


def holdout(model: str, held: Iterable[int], failed: Iterable[int] = ()) -> HoldoutScore:
    """A walk over the cutoffs `held`, each a little worse than the last, then over one of `failed`."""
    original = look(model, 0, 0.0)
    looks = [look(model, n, -0.002 * place) for place, n in enumerate(held, 1)]
    boldest = (original, *looks)[-1]
    return HoldoutScore(
        pool="pool",
        model=model,
        steps=boldest.steps,
        weights=boldest.weights,
        tasks=boldest.tasks,
        original=original,
        walked=(*looks, *(look(model, n, -0.05) for n in failed)),
    )


def points_at(cutoffs: Mapping[str, int]) -> OperatingPoints:
    """Nothing but a deployed point, which saves nothing."""
    none = Savings(checkpoint_bytes=1, resident_bytes=1, duplicates=0, freed=0, overhead=0)
    drops = dict.fromkeys(cutoffs, 0.0)
    deployed = OperatingPoint(name="deployed", criterion="", cutoffs=dict(cutoffs), drops=drops, savings=none)
    return OperatingPoints(pool="pool", points=(), frontier=(), deployed=deployed, alignment=4096)


def evaluation(scores: Mapping[str, float], higher_is_better: bool = True, questions: int = 100) -> Evaluation:
    return Evaluation(
        weights="",
        context="",
        split="search",
        tasks={
            task: TaskResult(value=value, higher_is_better=higher_is_better, questions=(0.0,) * questions)
            for task, value in scores.items()
        },
    )
