"""Which models of a pool were trained from the same weights, told from their own.

Averaging needs matrices that correspond row by row. Fine-tuning moves weights little, so that models of one base agree
in the means of their rows; models of different bases, though of one shape, do not agree at all.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from scipy.sparse.csgraph import connected_components

from sandhi_core.moments import RowStatistics
from sandhi_core.records import Fingerprint, Slot

KIN = 0.5
"""Correlation of row means over all slots that two models have in common, from which on they are kin. Unrelated
matrices have about 0, fine-tunes of one base nearly 1."""

STRANGERS = ""
"""The family of all models that are nobody's kin: nothing says that they fit, nothing keeps them apart."""


def families(
    fingerprints: Mapping[str, Fingerprint], rows: Callable[[Fingerprint, str], RowStatistics]
) -> dict[str, str]:
    """Model to its family, named by the first of its models in order. Kinship of kin is kinship.

    `rows` gives the row statistics of a 2-D tensor; one set of same-layer slots is held at a time.
    """
    names = sorted(fingerprints)
    products = np.zeros((len(names), len(names)))
    squares = np.zeros((len(names), len(names)))  # of the first model, over what it has in common with the second
    for slots in _sets(fingerprints):
        at = [names.index(slot.model) for slot in slots]
        means = np.stack([_centred(rows(fingerprints[slot.model], slot.tensor)) for slot in slots])
        found = means @ means.T
        products[np.ix_(at, at)] += found
        squares[np.ix_(at, at)] += np.diag(found)[:, None]
    lengths = np.sqrt(squares * squares.T)
    correlation = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    _, labels = connected_components(correlation >= KIN, directed=False)
    first = {label: names[int(np.argmax(labels == label))] for label in labels}
    alone = {label for label in labels if int((labels == label).sum()) == 1}
    return {name: STRANGERS if label in alone else first[label] for name, label in zip(names, labels, strict=True)}


def _sets(fingerprints: Mapping[str, Fingerprint]) -> Iterator[list[Slot]]:
    alike: dict[tuple[int, str], list[Slot]] = defaultdict(list)
    for _, fingerprint in sorted(fingerprints.items()):
        for slot in fingerprint.slots:
            alike[slot.layer, slot.key].append(slot)
    return (slots for slots in alike.values() if len(slots) > 1)


def _centred(statistics: RowStatistics) -> npt.NDArray[np.float64]:
    means = statistics.mean.double().numpy()
    centred: npt.NDArray[np.float64] = means - means.mean()
    return centred
