"""The compatibility key, held to what transformers computes: whatever a configuration changes of a module's output is
in the key of that module's tensors, and what changes nothing is in none.

Every field of every supported configuration is edited. The edited model has the original's weights, and each of its
modules is given what it had in the original: so what is compared is what a module makes of the same input, not what an
earlier one passed on. Experts are private, so nothing of theirs is ever shared and no key speaks of them.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sandhi_core.checkpoints.architecture import beside, problems_of, slots
from sandhi_core.checkpoints.architectures import ARCHITECTURES
from sandhi_core.checkpoints.checkpoint import Checkpoint, refuse, tensor_digest
from sandhi_core.checkpoints.survey_files import Survey
from sandhi_core.errors import CheckpointError
from sandhi_core.preflight.loading import check_model_class
from tests.models import BUILDERS

LENGTH = 96  # tokens: longer than the window, the longest context and that of a rope before it was scaled
SMALL: dict[str, Any] = {"max_position_embeddings": 48, "dtype": torch.float32}
WINDOW = {"sliding_window": 16}
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "gemma": {},
    "gemma2": WINDOW | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 8},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8},
    "phi3": WINDOW,
    "qwen3_moe": {"use_sliding_window": True, **WINDOW},
    "mixtral": WINDOW,
}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24}
YARN = {"factor": 2.0, "original_max_position_embeddings": 24, "beta_fast": 24.0, "beta_slow": 2.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": FACTORS | {"original_max_position_embeddings": 24},
}
MEANINGLESS = frozenset(
    """_name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward dtype embd_pdrop eos_token_id
    id2label initializer_range is_encoder_decoder label2id output_attentions output_hidden_states output_router_logits
    pad_token_id pretraining_tp problem_type resid_pdrop router_aux_loss_coef router_jitter_noise transformers_version
    use_cache""".split()
)
CAUTIOUS = {
    "use_bidirectional_attention": ("gemma", "gemma2"),  # transformers ignores it in these
    "attn_logit_softcapping": ("gemma3_text",),  # likewise
}
"""Fields that other servers may honour: in the key although transformers' answers stay."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns of every setting that a rope does not have."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity(before)


@dataclass(frozen=True)
class Original:
    """A tiny checkpoint, opened, and what its modules were given and made of it."""

    opened: Checkpoint
    config: dict[str, Any]
    weights: dict[str, Tensor]
    digests: dict[str, str]
    made: dict[str, Tensor]
    keys: dict[str, str]


def module_names(model: nn.Module) -> list[str]:
    """The modules of which each has keys of its own, and the whole."""
    names = [n for n, _ in model.named_modules() if n.startswith("model.layers.") and n.count(".") == 3]
    return [*names, "model.norm", "lm_head"]


def run(config: dict[str, Any], weights: dict[str, Tensor], given: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """What every module makes of what it is given, and "logits" of the last; with `given` None, what it gets goes
    under "<module".

    Raises whatever transformers raises."""
    read = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(read, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=True)
    made: dict[str, Tensor] = {}

    def before(name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if given is None:
                made[f"<{name}"] = args[0] if args else kwargs["hidden_states"]
                return None
            put = given[f"<{name}"]
            return ((put, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": put})

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            made[name] = output[0] if isinstance(output, tuple) else output

        return hook

    for name in module_names(model):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(before(name), with_kwargs=True)
        module.register_forward_hook(after(name))
    first = model.get_submodule("model.layers.0")
    first.register_forward_pre_hook(lambda _, args: made.update({"embedded": args[0]}))
    tokens = torch.arange(LENGTH).remainder(61).add(3).unsqueeze(0)
    with torch.no_grad():
        answer = model(input_ids=tokens, use_cache=False, return_dict=True)
    return made | {"logits": answer.logits}


@cache
def original(model_type: str, rope: str) -> Original:
    with TemporaryDirectory() as folder:
        given = BASES[model_type] | SMALL
        if rope != "default":
            scaled = {"rope_type": rope, "rope_theta": 1e4} | ROPES[rope]
            kinds = ("full_attention", "sliding_attention")
            given["rope_parameters"] = dict.fromkeys(kinds, scaled) if model_type == "gemma3_text" else scaled
        opened = Checkpoint.open(BUILDERS[model_type](Path(folder) / "m", tie_word_embeddings=False, **given), "m")
        saved = AutoModelForCausalLM.from_pretrained(opened.directory, dtype=torch.float32)
        weights = {n: t.clone() for n, t in saved.state_dict().items()}
        digests = {
            n: tensor_digest(opened.header(n).dtype, opened.header(n).shape, opened.raw(n)) for n in opened.names
        }
        config = {"model_type": model_type} | opened.config
        made = run(config, weights, None)
        return Original(opened, config, weights, digests, made, keys_of(opened, config, digests))


def keys_of(opened: Checkpoint, config: dict[str, Any], digests: dict[str, str]) -> dict[str, str]:
    """By tensor. Raises CheckpointError where the configuration is refused for these weights."""
    if problems := problems_of("m", config, opened.headers):
        raise refuse(problems[0])
    found = slots("m", config, opened.headers, digests)[0]
    return {s.tensor: s.key for s in (*found, *beside("m", config, opened.headers, digests, ("norms", "embeddings")))}


def module_of(tensor: str) -> str:
    """The module whose output a tensor's key is to tell of; attention and MLP as wholes."""
    if tensor.startswith("model.layers."):
        return ".".join(tensor.split(".")[:4])
    return "model.norm" if tensor == "model.norm.weight" else "logits"


def changed(one: Original, other: dict[str, Tensor]) -> set[str]:
    said = {n for n, t in one.made.items() if not n.startswith("<") and not torch.equal(t, other[n])}
    return {"logits" if n in ("lm_head", "embedded") else n for n in said}


def verdict(one: Original, config: dict[str, Any]) -> str:
    """How an edit ends. Fails where a module answers otherwise, and the keys of its tensors are the same."""
    try:
        keys = keys_of(one.opened, config, one.digests)
    except CheckpointError:
        return "refused"
    try:
        moved = changed(one, run(config, one.weights, one.made))
    except Exception:
        found = Survey(one.opened.directory, "m", "", config=config)
        check_model_class(found)
        if any(p.code == "config-unusable" for p in found.problems):
            return "refused"
        raise
    told = {module_of(t) for t in keys if keys[t] != one.keys[t]}
    private = moved - {module_of(t) for t in keys}  # experts have no keys
    assert moved - private <= told, f"of {sorted(moved - private - told)} the keys are the same"
    layers = {n.rpartition(".")[0] for n in moved if n.endswith("norm")}  # a layer's norms are in all of its keys
    if not all(n in moved or n.rpartition(".")[0] in layers for n in told):
        return "told too much"
    return "told" if told else "private" if moved else "same"


# --- edits --------------------------------------------------------------------------------------------------


def edits(name: str, value: Any) -> Iterator[Any]:
    """Other values of a field: of its kind, and what stands for none."""
    if name in ("hidden_act", "hidden_activation"):
        yield from ("gelu", "relu", "gelu_pytorch_tanh", "silu", "nonesuch")
    elif name == "layer_types" and value:
        yield from (value[::-1], ["full_attention"] * len(value), ["sliding_attention"] * len(value), None)
    elif name == "dtype":
        yield from ("float16", "bfloat16", None)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2, value // 2, None)
    elif isinstance(value, float):
        yield from (value * 2 + 0.5, value / 2, 0.0, None)
    elif value is None:
        yield from (True, 1, 8, 0.5)
    elif isinstance(value, str):
        yield from ("another", None)
    elif isinstance(value, list):
        yield from ([], value[::-1], [0], [1], None)
    elif isinstance(value, dict):
        yield from ({}, None)


def other_values(config: dict[str, Any], name: str, value: Any) -> Iterator[dict[str, Any]]:
    return (config | {name: edited} for edited in edits(name, value) if edited != value)


def test_every_architecture_is_tried() -> None:
    assert set(BASES) == set(ARCHITECTURES)


@pytest.mark.parametrize("model_type", sorted(BASES))
def test_a_field_that_changes_an_answer_is_in_the_key_and_no_other_is(model_type: str) -> None:
    one = original(model_type, "default")
    fields = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(one.config)).to_dict()
    found: dict[str, set[str]] = defaultdict(set)
    for name, value in fields.items():
        for config in other_values(one.config, name, value):
            found[name].add(verdict(one, config))
    assert found.keys() == fields.keys()
    assert {f for f, e in found.items() if "told too much" in e} == {
        f for f, of in CAUTIOUS.items() if model_type in of
    }
    for name in MEANINGLESS & found.keys():
        assert found[name] <= {"same", "refused"} and "same" in found[name], name
    activation = ARCHITECTURES[model_type].activation
    assert "told" in found["rms_norm_eps"] and ("told" in found[activation]) == bool(ARCHITECTURES[model_type].mlp)
    assert found["hidden_size"] == found["vocab_size"] == found["num_hidden_layers"] == {"refused"}


ROPE_EDITS: dict[str, tuple[Any, ...]] = {
    "rope_theta": (2e4, 10003),
    "factor": (3.0, 5),
    "low_freq_factor": (0.5, 2),
    "high_freq_factor": (3.0, 8),
    "original_max_position_embeddings": (12, 48),
    "short_factor": ([1.0, 1.0, 1.0, 1.5],),
    "long_factor": ([1.0, 1.0, 1.0, 1.5],),
    "attention_factor": (0.7, None),
    "beta_fast": (32, 4.0),
    "beta_slow": (1, 0.1),
    "mscale": (0.5, None),
    "mscale_all_dim": (0.5,),
    "truncate": (True, False),
    "partial_rotary_factor": (1.0, 0.5),
    "rope_type": tuple(ROPES),
}
BESIDE = {  # fields that stand beside the rope and may have a say in it
    "max_position_embeddings": (24, 72, 200),
    "original_max_position_embeddings": (12, 24, 48),
    "partial_rotary_factor": (1.0, 0.5),
    "rope_theta": (1e4, 2e4),
    "rope_scaling": ({"type": "linear", "factor": 3.0}, {"rope_type": "default"}),
}
KINDS = ("full_attention", "sliding_attention")
OF_ROPES = [("llama", rope) for rope in ROPES] + [("gemma3_text", rope) for rope in ROPES] + [("phi3", "longrope")]


def with_rope(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Changed for one kind of layer, where there are two."""
    rope = config["rope_parameters"]
    if KINDS[0] not in rope:
        return config | {"rope_parameters": rope | changes}
    return config | {"rope_parameters": rope | {KINDS[0]: rope[KINDS[0]] | changes}}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "rope"), OF_ROPES)
def test_whatever_a_rope_says_and_wherever_it_says_it(model_type: str, rope: str) -> None:
    one = original(model_type, rope)
    found: dict[str, set[str]] = defaultdict(set)
    for name, values in ROPE_EDITS.items():
        found[name] |= {verdict(one, with_rope(one.config, **{name: value})) for value in values}
    for name, values in BESIDE.items():
        found[name] |= {verdict(one, one.config | {name: value}) for value in values}
    assert {"told"} <= found["rope_theta"] and found["rope_type"] & {"told", "refused"}
    assert all({"told", "told too much"} & found[name] for name in ROPES[rope])  # of some 96 tokens know nothing
    if rope in ("default", "linear", "llama3"):
        assert found["max_position_embeddings"] == {"same"}
