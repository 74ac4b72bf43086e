"""What the words of a report's tables mean; each note is a paragraph below its table."""

from collections.abc import Iterable

from sandhi_core.words import size

QUALITY = (
    "Changes are turned so that negative is worse. Within budget: the measured change keeps the budget.",
    "Certified: so does its one-sided 95 % bound, here and at every cutoff that was tried before it. One of those "
    "that missed it leaves a model uncertified, however sure its own interval looks; so does a metric that is no "
    "mean over questions, of which the interval says nothing. Certifiable from: the smallest budget that so many "
    "questions could certify of weights that lose nothing; a smaller one takes more questions.",
)

BYTES = (
    "Claimed: bytes of distinct tensors that need not be held again, exact duplicates included, less what models add "
    "to shared ones. On disk: every "
    "exported file re-read. In memory: processes that load the exports against processes that load the originals.",
)

POINTS = (
    "An operating point is a cutoff for every model: how many steps of its trajectory it goes. B and C hold all "
    "models to one cutoff, Bpm and Cpm give each its own (pm: per model). Kpm is the knee of the savings: the "
    "budget after which a larger one brings little more. On the frontier no other point saves more at no larger drop.",
)

TRAJECTORIES = (
    "Deepest in budget: the last cutoff within budget on the search split. Knee: the cutoff after which a larger "
    "part of the budget frees little more. Holdout looks: cutoffs tried on questions never used before, from safe "
    "to bold, up to the first out of budget. Deployed: the cutoff that is served. A walk's step is one component; a "
    "ladder's is an assignment of the whole model, each bolder than the one before.",
)

RANKS = (
    "Numbers are the ranks of what a model adds to a shared matrix; 0: it holds it as it is; s: it also scales and "
    "shifts its rows; =: identical in other models from the start; -: shared with none."
)

SLOTS = "A slot is one weight matrix of one model. Those listed here stay the model's own without having been tried."

STOCK = (
    "Models whose tensors are all the same but for residuals are adapters of one base: one stock vLLM serves it with "
    "all of them. Its files are links to those of the models, so it takes no bytes. A model that is no adapter "
    "is exported like any other.",
    "Scored were the models as Sandhi's loader runs them. An engine applies adapters by functions of its own: its "
    "answers were not scored.",
)


def scored(rounding: Iterable[str]) -> tuple[str, ...]:
    """That the dtype of scoring is not the one of serving, where it is not."""
    return tuple(f"Quality was {note}." for note in rounding)


def engines(claimed: int, before: int, kept: int) -> str:
    """What is claimed, and what engines with adapters need not hold: two numbers, and why. All are bytes; `before`: of
    weights with a whole copy of every model."""
    saved = f"{size(before - kept)} less" if kept <= before else f"{size(kept - before)} more"
    return (
        f"Claimed are {size(claimed)}. Engines with adapters hold {size(kept)} of weights in place of {size(before)}, "
        f"{saved} (estimated): vLLM keeps buffers for every adapter, of the largest rank that any of its base has in "
        "all layers that one of them adapts, and holds models that are no adapters whole."
    )
