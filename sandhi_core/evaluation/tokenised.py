"""lm-eval's HF model where the same pairs of texts are asked under weights after weights."""

from typing import Any

from lm_eval.models.huggingface import HFLM


class TokenisedOnceLM(HFLM):  # type: ignore[misc]
    """Tokenises every pair of context and continuation once. `settings`: those of lm-eval's HF model."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._encoded: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = (context, continuation)
        if pair not in self._encoded:
            self._encoded[pair] = super()._encode_pair(context, continuation)
        return self._encoded[pair]
