"""A fingerprint as far as names, headers and the files beside the weights tell it.

For checking and planning pools whose weights take hours to read. No tensor of one model is told to be equal to another
model's, so what is counted with it is counted as if there were no exact duplicates. It is never kept.
"""

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.meaning import EMBEDDING, HEAD, Meaning
from sandhi_core.checkpoints.scan import described
from sandhi_core.records import Fingerprint, TensorInfo, digest_of


def outline(checkpoint: Checkpoint) -> Fingerprint:
    """The fingerprint with a name in place of every tensor's digest, and no statistics.

    Raises CheckpointError for tensors that do not make up the architecture, and for files that cannot be read any more.
    """
    tied = Meaning(checkpoint.model, checkpoint.config).tied
    tensors = []
    for name, header in checkpoint.headers.items():
        # Whether a tied head is the embeddings, as it should be, only weights tell.
        held = HEAD if tied and name.removeprefix("model.") == EMBEDDING else name
        tensors.append(
            TensorInfo(
                name=name,
                file=header.file,
                dtype=header.dtype,
                shape=header.shape,
                nbytes=header.nbytes,
                digest=digest_of([checkpoint.model, held]),
                mean=0.0,
                std=0.0,
                constant_rows=0,
            )
        )
    return described(checkpoint, tensors, rows="")
