"""What the engines that a pool names will not serve of it: told before anything is scored."""

from collections.abc import Iterator, Mapping

from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.costs import met
from sandhi_core.deploy.vllm import heads_beyond_cpu
from sandhi_core.errors import Problem
from sandhi_core.pools.pool import Pool
from sandhi_core.records import Fingerprint


def not_served(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    """A warning for every model that its engine would serve wrongly or not at all, of those that can be read. None is
    an error: where a pool is served, and by whose code, its file does not say."""
    yield from _heads(pool, fingerprints)
    yield from _left_out(pool, fingerprints)


def _heads(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    """Only of pools that are scored on a CPU: others are hardly served on one."""
    if pool.evaluation.device != "cpu":
        return
    for entry in pool.models:
        if entry.name in fingerprints and pool.engines[entry.name] == "vllm":
            size = heads_beyond_cpu(Checkpoint.open(resolve(entry), entry.name).config)
            if size is not None:
                yield _warning(
                    "heads-beyond-cpu",
                    entry.name,
                    f"its attention heads have {size} elements, which vLLM takes on a GPU only",
                    "give the model `engine: transformers`; nothing, if the pool is served on a GPU",
                )


def _left_out(pool: Pool, fingerprints: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    """Where models may add to shared tensors, those that could share any and go to transformers."""
    if pool.merging.residuals == "none" and pool.merging.affine == "none":
        return
    places = met(fingerprints.values())
    for model, found in fingerprints.items():
        shares = any((slot.key, slot.layer) in places for slot in found.slots)
        if shares and pool.engines[model] == "transformers":
            yield _warning(
                "additions-left-out",
                model,
                "what it may add to shared tensors is applied by sandhi_core.serving.load, but not by `transformers "
                "serve`: `sandhi serve` will refuse it if it adds any",
                "nothing, if your own code loads it so; else serve it by vLLM with the plugin",
            )


def _warning(code: str, model: str, message: str, remedy: str) -> Problem:
    return Problem(code=code, severity="warning", model=model, message=message, remedy=remedy)
