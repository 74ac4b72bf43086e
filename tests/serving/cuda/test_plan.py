"""Where shared tensors lie in the owner's memory."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.records import ExportedTensor
from sandhi_core.serving.cuda.plan import ALIGNMENT, HeldSlice, Place, plan
from sandhi_core.serving.slices import WHOLE, Slice, Slices

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
SHAPES = {"mlp.up_proj": (48, 32), "mlp.gate_proj": (48, 32), "mlp.down_proj": (32, 48), "self_attn.k_proj": (16, 32)}
NAMES = [f"model.layers.{layer}.{module}.weight" for layer in (0, 1) for module in SHAPES]
UP, UP_1 = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
WIDTHS = {"F32": 4, "BF16": 2, "F64": 8}


def exported(name: str, digest: str, dtype: str = "BF16") -> ExportedTensor:
    shape = SHAPES[name.split(".", 3)[3].removesuffix(".weight")]
    nbytes = prod(shape) * WIDTHS[dtype]
    return ExportedTensor(digest=digest, dtype=dtype, shape=shape, nbytes=nbytes, file="f", sharing="merged")


def sliced(size: int = 1, rank: int = 0) -> dict[str, Slices]:
    return {model: Slices(model, CONFIG, size, rank) for model in ("a", "b")}


def test_one_tensor_under_several_names_is_one_place() -> None:
    tensors = {"a": {UP: exported(UP, "d"), UP_1: exported(UP_1, "e")}, "b": {UP_1: exported(UP_1, "d")}}
    found = plan(tensors, {"a": [UP, UP_1], "b": [UP_1]}, sliced())
    nbytes = 48 * 32 * 2
    assert found.places == {
        HeldSlice("d", WHOLE): Place(0, nbytes, "BF16", (48, 32)),
        HeldSlice("e", WHOLE): Place(nbytes, nbytes, "BF16", (48, 32)),
    }
    assert found.names["a"][UP] == found.names["b"][UP_1] == HeldSlice("d", WHOLE)
    assert found.nbytes == found.held == 2 * nbytes
    assert found.arena(2 << 20) == 2 << 20


def test_one_tensor_in_two_roles_is_two_places_where_ranks_cut_it_otherwise() -> None:
    """A square matrix may be divided by rows in one layer and by columns in another."""
    config = {**CONFIG, "intermediate_size": 32}
    down = "model.layers.0.mlp.down_proj.weight"
    tensor = ExportedTensor(digest="d", dtype="BF16", shape=(32, 32), nbytes=2048, file="f", sharing="merged")
    for size, places in ((1, 1), (2, 2)):
        slices = {"a": Slices("a", config, size, 0)}
        found = plan({"a": {UP: tensor, down: tensor}}, {"a": [UP, down]}, slices)
        assert len(found.places) == places and found.held == 2048
    assert found.names["a"][down] == HeldSlice("d", Slice(1, ((0, 16),)))


@given(
    held=st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.sampled_from(NAMES)),
        st.tuples(st.sampled_from("uvwxyz"), st.sampled_from(sorted(WIDTHS))),
        min_size=1,
    ),
    size=st.sampled_from([1, 2, 4]),
    granularity=st.sampled_from([1 << 16, 2 << 20]),
)
def test_places_are_aligned_apart_and_enough(
    held: dict[tuple[str, str], tuple[str, str]], size: int, granularity: int
) -> None:
    tensors: dict[str, dict[str, ExportedTensor]] = {"a": {}, "b": {}}
    for (model, name), (letter, dtype) in held.items():
        shape = SHAPES[name.split(".", 3)[3].removesuffix(".weight")]
        tensors[model][name] = exported(name, f"{letter}{dtype}{shape}", dtype)  # a digest says dtype and shape too
    found = plan(tensors, tensors, sliced(size, size - 1))
    assert found == plan(dict(reversed(tensors.items())), tensors, sliced(size, size - 1))
    end = 0
    for place in found.places.values():
        assert place.offset % ALIGNMENT == 0 and end <= place.offset < end + ALIGNMENT
        assert place.nbytes == prod(place.shape) * WIDTHS[place.dtype]
        end = place.offset + place.nbytes
    assert found.nbytes == end
    assert found.arena(granularity) % granularity == 0 and 0 <= found.arena(granularity) - end < granularity
    for model, name in held:
        held = found.names[model][name]
        assert held.digest == tensors[model][name].digest
        assert found.places[held].shape == sliced(size, size - 1)[model].of(name).shape(tensors[model][name].shape)
    assert {p for slices in found.names.values() for p in slices.values()} == set(found.places)
