"""What of a model lies beside its projections and may be shared where a pool asks for it: norms, biases, embeddings."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sandhi_core.checkpoints.architecture import beside
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.meaning import HEAD
from sandhi_core.checkpoints.vocabulary import spoken
from sandhi_core.records import Fingerprint, Slot, digest_of

STORED_TWICE = "its files hold the tied embeddings a second time as lm_head.weight; save it again with save_pretrained"
NO_VOCABULARY = "its tokenizer does not say which token has which row"
UNFIT = (STORED_TWICE, NO_VOCABULARY)


@dataclass(frozen=True)
class Besides:
    """`slots` that may be shared; `unfit`: others, each with the reason; `vocabulary` names the model's tokens and
    their numbers: embeddings are comparable row by row where it agrees."""

    slots: tuple[Slot, ...] = ()
    unfit: Mapping[Slot, str] = field(default_factory=dict)
    vocabulary: str = ""


def besides(checkpoint: Checkpoint, fingerprint: Fingerprint, kinds: Collection[str]) -> Besides:
    """Those of one model, of these kinds."""
    digests = {tensor.name: tensor.digest for tensor in fingerprint.tensors}
    slots = beside(checkpoint.model, checkpoint.config, checkpoint.headers, digests, kinds)
    tables = [slot for slot in slots if slot.component == "embeddings"]
    if not tables:
        return Besides(slots)
    tokens = spoken(checkpoint.directory)
    # A tied head that is stored would have to be replaced together with the embeddings: some loaders read it.
    twice = HEAD in digests and not any(slot.projection == HEAD for slot in tables)
    reason = STORED_TWICE if twice else "" if tokens else NO_VOCABULARY
    if reason:
        return Besides(tuple(s for s in slots if s not in tables), dict.fromkeys(tables, reason))
    return Besides(slots, {}, digest_of(tokens))
