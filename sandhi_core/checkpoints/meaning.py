"""What a configuration says that changes what equal shapes mean.

Configurations are read by transformers' own classes, so that defaults and both spellings of every field (the
rope's: `rope_theta` and `rope_scaling`, or `rope_parameters`) mean here what they mean to the loader.
"""

import copy
from typing import Any

from transformers import CONFIG_MAPPING

from sandhi_core.checkpoints.architectures import ARCHITECTURES, Architecture
from sandhi_core.errors import CheckpointError
from sandhi_core.records import Component, canonical_json

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_OLD_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq")
_NEW_ROPE = "rope_parameters"
_SELF_CONTAINED = ("default", "linear", "llama3")  # ropes that do not depend on the longest context
_UNSAID: dict[str, dict[str, Any]] = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}}
"""What a rope of a type means where it is silent."""
_KINDS = ("full_attention", "sliding_attention")
_LARGEST = 1 << 24  # beyond it a dimension is damaged, not large
_MOST = 4096  # likewise for the number of layers or of a layer's experts


class Meaning:
    """A configuration with defaults filled in. Raises CheckpointError where the model type is not supported
    or the configuration contradicts itself."""

    def __init__(self, model: str, config: dict[str, Any]) -> None:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            said = "no model type" if model_type is None else f"model type {model_type!r}"
            raise CheckpointError(
                f"names {said}, which is not supported",
                model=model,
                file="config.json",
                remedy=f"leave this model out; supported are {', '.join(ARCHITECTURES)}",
                code="model-type-unsupported",
            )
        self.model = model
        self.architecture: Architecture = ARCHITECTURES[model_type]
        self.config = self._read(config)
        self.dims = self._dims()
        self.tied = bool(self.config["tie_word_embeddings"])
        try:
            self._require_one_rope(config)
            self._require_runnable()
            self._attention = [self._attention_of(layer) for layer in range(self.layers)]
            self._mlp = self._common("mlp.") | {"activation": self.config[self.architecture.activation]}
            self.sparse = [self._has_experts(layer) for layer in range(self.layers)]
            canonical_json([self._attention, self._mlp])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # What transformers lets through although no model can be made of it.
            raise self._invalid(f"{type(error).__name__}: {error}") from None

    @property
    def layers(self) -> int:
        return self.dims["layers"]

    def of(self, component: Component, layer: int) -> dict[str, Any]:
        """What a projection of a layer's component means beyond its shape."""
        return self._attention[layer] if component == "attn" else self._mlp

    def beside(self, name: str, layer: int) -> dict[str, Any]:
        """What a tensor that is no projection means beyond its shape; `name` is that below its layer."""
        if name.startswith(("self_attn.", "mlp.")):
            return self.of("attn" if name.startswith("self_attn.") else "mlp", layer)
        if name in (EMBEDDING, HEAD):
            softcap = self.config.get("final_logit_softcapping")
            return {"tied": self.tied, "scaled": self.architecture.scaled, "softcap": softcap}
        common = self._common("mlp.")
        return {part: common[part] for part in ("norm", "norms", "eps")}

    def _attention_of(self, layer: int) -> dict[str, Any]:
        kind = self._layer_type(layer)
        windowed = kind in (None, "sliding_attention")  # None: the window, if any, holds for every layer
        return self._common("self_attn.") | {
            "heads": self.dims["heads"],
            "key_heads": self.dims["key_heads"],
            "head": self.dims["D"],
            "rope": _rope(self.config, kind),
            "window": self.config.get("sliding_window") if windowed else None,
            "scale": self.config.get("query_pre_attn_scalar"),
            "softcap": self.config.get("attn_logit_softcapping"),
            "bidirectional": bool(self.config.get("use_bidirectional_attention")),
        }

    def biased(self) -> set[str]:
        """Modules of a layer that have a bias."""
        flags = self.architecture.biases
        return {m for flag, modules in flags if flag is None or self.config.get(flag) for m in modules}

    def _has_experts(self, layer: int) -> bool:
        step = self.config.get("decoder_sparse_step") or 1
        dense = layer in self.config.get("mlp_only_layers", ()) or (layer + 1) % step
        return bool(self.architecture.experts) and self.dims["E"] > 0 and not dense

    def size(self, dim: str) -> int:
        """A dimension of the tables, such as H, 2I or Q+2K."""
        return sum(int(part[:-1] or 1) * self.dims[part[-1]] for part in dim.split("+"))

    def _common(self, prefix: str) -> dict[str, Any]:
        return {
            "norm": self.architecture.norm,
            "norms": sorted(n for n in self.architecture.norms if "." not in n or n.startswith(prefix)),
            "eps": float(self.config["rms_norm_eps"]),
            "biases": sorted(m for m in self.biased() if m.startswith(prefix)),
        }

    def _layer_type(self, layer: int) -> str | None:
        types = self.config.get("layer_types")
        return str(types[layer]) if types else None

    def _read(self, config: dict[str, Any]) -> dict[str, Any]:
        try:
            read = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
            read.standardize_rope_params()  # some of the rope's settings may stand outside of it
            filled: dict[str, Any] = read.to_dict()
        except Exception as error:  # the classes raise whatever comes up: KeyError, TypeError, their own
            raise self._invalid(" ".join(str(error).split())) from None
        return filled

    def _dims(self) -> dict[str, int]:
        config = self.config
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        dims = {
            "layers": self._number("num_hidden_layers", config.get("num_hidden_layers"), _MOST),
            "heads": self._number("num_attention_heads", heads),
            "key_heads": self._number("num_key_value_heads", config.get("num_key_value_heads") or heads),
            "H": self._number("hidden_size", hidden),
            "I": self._number("intermediate_size", config.get("intermediate_size")),
            "V": self._number("vocab_size", config.get("vocab_size")),
            "E": self._number("num_local_experts", config.get("num_local_experts", 0), _MOST, 0),
        }
        dims["D"] = self._number("head_dim", config.get("head_dim") or dims["H"] // dims["heads"])
        dims["M"] = self._number("moe_intermediate_size", config.get("moe_intermediate_size") or dims["I"])
        dims["Q"], dims["K"] = dims["heads"] * dims["D"], dims["key_heads"] * dims["D"]
        if dims["heads"] % dims["key_heads"]:
            raise self._invalid(f"{dims['heads']} heads cannot share {dims['key_heads']} key-value heads")
        types = config.get("layer_types")
        if types and len(types) != dims["layers"]:
            raise self._invalid(f"it lists {len(types)} layer types for {dims['layers']} layers")
        return dims

    def _number(self, name: str, value: Any, largest: int = _LARGEST, smallest: int = 1) -> int:
        if type(value) is not int or not smallest <= value <= largest:
            raise self._invalid(f"{name} cannot be {value!r}")
        return value

    def _require_one_rope(self, config: dict[str, Any]) -> None:
        """Readers of either spelling of the rope must come to the same one."""
        if config.get(_NEW_ROPE) is None or all(config.get(name) is None for name in _OLD_ROPE):
            return
        old = self._read({k: v for k, v in config.items() if k != _NEW_ROPE})
        new = self._read({k: v for k, v in config.items() if k not in _OLD_ROPE})
        for kind in dict.fromkeys(self.config.get("layer_types") or [None]):
            if (said := _rope(new, kind)) != (meant := _rope(old, kind)):
                raise self._invalid(f"{_NEW_ROPE} says {said}, but the older fields say {meant}")

    def _require_runnable(self) -> None:
        """What transformers would make a model of, and then fail on the first token or take for another model than
        servers do."""
        config, types = self.config, self.config.get("layer_types") or ()
        if strange := sorted({str(kind) for kind in types} - set(_KINDS)):
            raise self._invalid(f"layers of {strange[0]!r} are unknown; known are {' and '.join(_KINDS)}")
        if "sliding_attention" in types and not config.get("sliding_window"):
            raise self._invalid("layer_types names sliding_attention, but there is no sliding_window")
        if not config.get("is_causal", True):
            raise self._invalid("is_causal is switched off: some servers would then see later tokens, others not")
        if not config.get("return_dict", True):
            raise self._invalid("return_dict is switched off, with which transformers' own models cannot be run")
        if self.dims["E"] and config["num_experts_per_tok"] > self.dims["E"]:
            raise self._invalid(f"a token cannot have {config['num_experts_per_tok']} of {self.dims['E']} experts")
        if not self.architecture.partial_rope:
            for kind in dict.fromkeys(types or (None,)):
                if (factor := _rope(config, kind)["partial_rotary_factor"]) != 1.0:
                    raise self._invalid(
                        f"some servers would turn {factor} of each head (partial_rotary_factor), some all"
                    )

    def _invalid(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"is no configuration that can be loaded: {reason}",
            model=self.model,
            file="config.json",
            remedy="take the file from the model's source again, or correct it",
            code="config-invalid",
        )


def _rope(config: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """The rope of layers of a kind, with what does not change it left out."""
    rope = config[_NEW_ROPE]
    rope = rope.get(kind, rope)  # gemma3_text has one for each kind of layer
    rope = {k: float(v) if type(v) is int else v for k, v in rope.items() if k != "type" and v is not None}
    rope = {"partial_rotary_factor": 1.0} | _UNSAID.get(rope["rope_type"], {}) | rope
    if rope["rope_type"] == "default":
        return {k: rope[k] for k in ("rope_type", "rope_theta", "partial_rotary_factor")}
    if rope["rope_type"] not in _SELF_CONTAINED:
        rope["max_position_embeddings"] = config["max_position_embeddings"]
    return rope
