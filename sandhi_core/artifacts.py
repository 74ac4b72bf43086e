"""The artifact root: every record that a stage gave, and where everything else of a pool lies.

    records/STAGE/KEY.json    what a stage gave, with the fingerprint of what it was made from
    scores/MODEL.jsonl        every evaluation ever made (evaluation.scorelog)
    datasets/                 what the datasets library makes of local task data
    scans/                    digests and statistics of weight files, by file identity (scan)
    inputs/, spectra/         second moments of inputs, and matrices' differences decomposed (rungs)
    store/                    shared tensors by digest (store)
    exports/POOL/ID/          exported checkpoints with their manifest (export)
    reports/POOL/             page, pictures and Parquet tables
    running/, devices/        locks of runs that Dagster started, and of the devices they score on
    scratch/                  caches and temporary files of libraries; may be removed while nothing runs
    dagster/                  Dagster's own files, unless DAGSTER_HOME says otherwise

Only this directory is ever written.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from sandhi_core.adapters import all_there
from sandhi_core.checkpoints.survey_files import FileIdentity
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.errors import ProofError, StoreError
from sandhi_core.files import locked, sweep, write_atomic, writing
from sandhi_core.graph import STAGES, Node, Stored
from sandhi_core.layout import DEPLOYMENT, MANIFEST, read_manifest, sizes_match
from sandhi_core.records import (
    CutoffSet,
    Fingerprint,
    Groups,
    HoldoutScore,
    MergedWeights,
    OperatingPoints,
    Plan,
    Profile,
    Record,
    SharingProof,
    Trajectory,
    canonical_json,
)

RECORDS: dict[str, type[Record]] = {
    "checkpoint": Fingerprint,
    "profile": Profile,
    "groups": Groups,
    "plan": Plan,
    "trajectory": Trajectory,
    "cutoffs": CutoffSet,
    "holdout": HoldoutScore,
    "operating_points": OperatingPoints,
    "merged_weights": MergedWeights,
    "sharing_proof": SharingProof,
    "deployment": DeploymentSpec,
}

LOCK_TRIES, LOCK_PAUSE = 5, 0.02  # the pause in seconds

R = TypeVar("R", bound=Record)


class Envelope(Record):
    """A record on disk, with what the planner needs to know about it."""

    stage: str
    key: str
    version: int
    fingerprint: str
    data_version: str
    own: Any  # the inputs besides upstreams, as fingerprinted: says what changed when a node is stale
    record: dict[str, Any]


# The groups of many models are large, and every model's plan begins with them.
@lru_cache(maxsize=4)
def _read(path: Path, node: Node, identity: FileIdentity) -> tuple[Envelope, Record]:
    """Read once a process, unless the file changes. Raises OSError, and ValueError where it is damaged."""
    envelope = Envelope.parse(path.read_bytes())
    record = RECORDS[node[0]].model_validate(envelope.record)
    if (envelope.stage, envelope.key) != node or record.digest != envelope.data_version:
        raise ValueError("not what was written")
    return envelope, record


@dataclass(frozen=True)
class Artifacts:
    root: Path

    def directory(self, *parts: str) -> Path:
        path = self.root.joinpath(*parts)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _path(self, node: Node) -> Path:
        stage, key = node
        return self.root / "records" / stage / f"{key}.json"

    def keys(self, stage: str) -> list[str]:
        """Of all that a stage ever gave, sorted: those of pools and models that are gone too. Raises StoreError where
        the records cannot be listed."""
        folder = self.root / "records" / stage
        try:
            names = [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            remedy = "run as the user that the artifact root belongs to"
            raise StoreError(f"cannot be read: {error.strerror}", file=str(folder), remedy=remedy) from error
        return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))

    def envelope(self, node: Node) -> Envelope | None:
        """The stored record, or None where there is none that can be read (a damaged one is made again)."""
        found = self._found(node)
        return None if found is None else found[0]

    def _found(self, node: Node) -> tuple[Envelope, Record] | None:
        path = self._path(node)
        try:
            return _read(path, node, FileIdentity.of(path.stat()))
        except (OSError, ValueError):  # a ValidationError too
            return None

    def damaged(self, node: Node) -> Path | None:
        """The file of a record that is there and cannot be read, though this version of its stage wrote it. Raises
        StoreError where the records cannot be listed."""
        if self.envelope(node) is not None or node[1] not in self.keys(node[0]):
            return None
        path = self._path(node)
        try:
            version = json.loads(path.read_bytes())["version"]
        except (OSError, ValueError, TypeError, KeyError):
            return path
        return path if version == STAGES[node[0]].version else None

    def known(self, node: Node) -> Envelope | None:
        """The stored record, or None where the stage has not run: for who removes what no record asks for. Raises
        StoreError where one is there that cannot be read."""
        envelope = self.envelope(node)
        if envelope is None and node[1] in self.keys(node[0]):
            raise StoreError(
                "cannot be read, so that what it needs is not known, and nothing is removed",
                file=str(self._path(node)),
                remedy="build its pool, which makes it again; of a pool that is no more, remove this file",
            )
        return envelope

    def stored(self, node: Node) -> Stored | None:
        """What the planner compares. An export that is gone counts as never made, and what was proved of it too:
        an export that is made again has no deployment yet."""
        envelope = self.envelope(node)
        if envelope is None:
            return None
        needed = {"merged_weights": MANIFEST, "sharing_proof": DEPLOYMENT, "deployment": DEPLOYMENT}.get(node[0])
        if _failed(envelope):
            return None  # a proof that failed is made again
        if needed and not self._sound(envelope, needed):
            return None
        if needed and not (self.root / envelope.record["export"]).is_dir():
            return None  # moved: what tells the path is written again
        return Stored(envelope.fingerprint, envelope.data_version)

    def failed(self, node: Node) -> str | None:
        """The inputs, by their fingerprint, of a proof that was made and did not pass."""
        envelope = self.envelope(node)
        return envelope.fingerprint if envelope is not None and _failed(envelope) else None

    def _sound(self, envelope: Envelope, needed: str) -> bool:
        """Whether an export still has `needed` and every file that its manifest names, each with the size it must
        have. Bytes are compared by `sandhi verify`."""
        export = self._export(envelope)
        try:
            manifest = read_manifest(export)
            if needed == DEPLOYMENT and json.loads((export / DEPLOYMENT).read_bytes())["manifest"] != manifest.digest:
                return False
            found = manifest.digest == envelope.record["manifest"] and sizes_match(export, manifest)
            return found and all_there(export, manifest)
        except (ProofError, OSError, ValueError, TypeError, KeyError):
            return False

    def _export(self, envelope: Envelope) -> Path:
        """`exports/POOL/ID` of this root, of whichever it says where it was copied or moved from."""
        return self.root.joinpath(*Path(envelope.record["export"]).parts[-3:])

    def deployed(self, pool: str) -> Path | None:
        """The specification that a pool was last deployed by, if its export is as it was then."""
        envelope = self.envelope(("deployment", pool))
        if envelope is None or not self._sound(envelope, DEPLOYMENT):
            return None
        return self._export(envelope) / DEPLOYMENT

    def required(self, node: Node) -> Envelope:
        """The stored record. Raises StoreError where the stage has not run."""
        return self._required(node)[0]

    def load(self, kind: type[R], stage: str, key: str) -> R:
        """The record of a node as what it is. Raises StoreError where the stage has not run."""
        _, record = self._required((stage, key))
        if not isinstance(record, kind):
            raise TypeError(f"{stage} gives no {kind.__name__}")
        return record

    def _required(self, node: Node) -> tuple[Envelope, Record]:
        found = self._found(node)
        if found is None:
            stage, key = node
            raise StoreError(
                f"{stage} of {key} has not run, or its record is damaged",
                file=str(self._path(node)),
                remedy=f"materialise {stage} of {key} first; `sandhi build` runs everything in order",
            )
        return found

    def save(self, node: Node, fingerprint: str, own: Any, record: Record) -> str:
        """Write a record for good; returns its data version."""
        stage, key = node
        text = record.canonical()  # of a plan of a large pool megabytes, so it is made once
        data_version = hashlib.sha256(text).hexdigest()
        before = canonical_json({"data_version": data_version, "fingerprint": fingerprint, "key": key, "own": own})
        after = canonical_json({"stage": stage, "version": STAGES[stage].version})
        data = before[:-1] + b',"record":' + text + b"," + after[1:] + b"\n"
        self.directory("records", stage)
        path = self._path(node)
        with writing(path, len(data)):
            write_atomic(path, data)
        return data_version

    def sweep(self) -> None:
        """Remove what killed processes left half-written. What lies elsewhere and is only linked to is swept too."""
        sweep(path for path in self.root.iterdir() if path.is_dir())

    @property
    def in_use(self) -> bool:
        """Whether a build holds the lock."""
        return locked(self.root / "lock")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One build of a root at a time. Released by the kernel when the process ends, however it ends.

        Raises StoreError where another process holds it.
        """
        self.directory()
        with writing(self.root / "lock"):
            handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _locked(handle):
                raise StoreError(
                    "another build or removal is using this artifact root",
                    file=str(self.root),
                    remedy="wait for it to end, or give another --root",
                )
            yield
        finally:
            os.close(handle)


def _failed(envelope: Envelope) -> bool:
    return envelope.record.get("passed") is False


def _locked(handle: int) -> bool:
    """Whether the lock could be had; tried again for a moment, because `in_use` holds it that long."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE)
        else:
            return True
    return False
