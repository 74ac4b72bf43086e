"""What the words of a report's tables mean; each note is a paragraph below its table."""

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
