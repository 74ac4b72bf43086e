from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.assignment import Assignment
from sandhi_core.records import Adjustment, Fingerprint, TensorInfo
from sandhi_core.savings import MIN_SHARED_BYTES, holdings, savings
from tests.synthetic import fingerprint, tensor


def model(name: str, *tensors: TensorInfo) -> Fingerprint:
    return fingerprint(name, 0).model_copy(update={"tensors": tensors})


def matrix(name: str, digest: str, nbytes: int = MIN_SHARED_BYTES) -> TensorInfo:
    return tensor(name, (nbytes // 2, 1), digest)


def assign(**tensors: dict[str, str]) -> dict[str, Assignment]:
    return {m: Assignment(assigned) for m, assigned in tensors.items()}


def test_nothing_merged_nothing_alike_nothing_saved() -> None:
    fingerprints = {m: model(m, matrix("up", m)) for m in "abc"}
    found = savings({}, fingerprints)
    assert (found.checkpoint_bytes, found.resident_bytes) == (3 * 4096, 3 * 4096)
    assert (found.duplicates, found.freed, found.overhead, found.net) == (0, 0, 0, 0)


def test_exact_duplicates_are_free_and_reported_apart() -> None:
    fingerprints = {m: model(m, matrix("embed", "same"), matrix("norm", "same", 128), matrix("up", m)) for m in "abc"}
    found = savings(assign(a={"up": "s"}, b={"up": "s"}), fingerprints)
    assert found.duplicates == 2 * 4096
    assert found.freed == 3 * 4096


def test_a_tensor_that_one_model_alone_merged_saves_nothing() -> None:
    fingerprints = {m: model(m, matrix("up", m)) for m in "ab"}
    assert savings(assign(a={"up": "s"}), fingerprints).freed == 0


def test_merging_a_duplicate_away_costs_what_it_had_saved() -> None:
    fingerprints = {m: model(m, matrix("up", "frozen" if m in "ab" else m)) for m in "abc"}
    assert savings({}, fingerprints).freed == 4096
    apart = savings(assign(a={"up": "s"}), fingerprints)
    assert (apart.duplicates, apart.freed) == (0, 0)
    moved = savings(assign(a={"up": "s"}, c={"up": "s"}), fingerprints)
    assert (moved.duplicates, moved.freed) == (0, 4096)


def test_the_same_bytes_under_another_name_are_not_one_tensor() -> None:
    fingerprints = {"a": model("a", matrix("up", "x")), "b": model("b", matrix("gate", "x"))}
    assert savings({}, fingerprints).freed == 0
    assert savings(assign(a={"up": "s"}, b={"gate": "s"}), fingerprints).freed == 0


def test_a_vector_below_a_page_is_worth_no_file_merged_or_not() -> None:
    fingerprints = {m: model(m, tensor("norm", (64,), m), tensor("wide", (2048,), m)) for m in "ab"}
    both = {"norm": "s", "wide": "s"}
    found = {h.name: h for h in holdings(assign(a=both, b=both), fingerprints)}
    assert (found["norm"].shared, found["wide"].shared) == (False, True)
    assert savings(assign(a=both, b=both), fingerprints).freed == 4096


def test_a_merged_tensor_may_be_someones_own() -> None:
    fingerprints = {m: model(m, matrix("up", m, 64)) for m in "ab"}
    (found,) = holdings(assign(a={"up": "b"}), fingerprints)
    assert (found.merged, found.owners, found.models, found.shared) == (("a",), ("b",), ("a", "b"), True)
    counted = savings(assign(a={"up": "b"}), fingerprints)
    assert (counted.duplicates, counted.freed) == (0, 64)


def test_what_models_add_is_taken_off() -> None:
    fingerprints = {m: model(m, matrix("up", m)) for m in "ab"}
    added = {"up": Adjustment(kind="low_rank", nbytes=96)}
    found = savings({"a": Assignment({"up": "s"}, added), "b": Assignment({"up": "s"})}, fingerprints)
    assert (found.freed, found.net) == (4096, 4000)


def test_a_head_that_repeats_the_embedding_is_not_resident() -> None:
    head, embedding = matrix("lm_head.weight", "e"), matrix("model.embed_tokens.weight", "e")
    tied, untied = model("a", embedding, head), model("b", embedding, matrix("lm_head.weight", "h"))
    found = savings({}, {"a": tied, "b": untied})
    assert (found.checkpoint_bytes, found.resident_bytes) == (4 * 4096, 3 * 4096)


names = st.sampled_from(["q", "k", "up", "down", "norm"])
pools = st.dictionaries(
    st.sampled_from("abcde"),
    st.dictionaries(names, st.tuples(st.sampled_from("xyz"), st.one_of(st.none(), st.sampled_from("stu")))),
    max_size=5,
)


@given(pools)
def test_freed_is_the_difference_to_the_distinct_tensors(
    pool: dict[str, dict[str, tuple[str, str | None]]],
) -> None:
    size = {"q": 8192, "k": 4096, "up": 12288, "down": 12288, "norm": 4094}
    fingerprints = {m: model(m, *(matrix(n, own, size[n]) for n, (own, _) in held.items())) for m, held in pool.items()}
    assigned = {m: {n: s for n, (_, s) in held.items() if s} for m, held in pool.items()}
    found = savings(assign(**assigned), fingerprints)
    total = distinct = 0
    one_copy: set[tuple[str, str]] = set()
    for held in pool.values():
        for name, (own, merged) in held.items():
            total += size[name]
            # Own tensors below a page are never shared: every model keeps its own.
            if merged is None and size[name] < MIN_SHARED_BYTES:
                distinct += size[name]
            else:
                one_copy.add((name, merged or own))
    distinct += sum(size[name] for name, _ in one_copy)
    assert found.checkpoint_bytes == total
    assert found.freed == total - distinct >= found.duplicates >= 0


def test_a_members_own_tensor_is_the_copy_and_a_bases_is_a_new_one() -> None:
    fingerprints = {m: model(m, matrix("up", m)) for m in "abc"}
    owned = assign(b={"up": "a"}, c={"up": "a"})
    found = savings(owned, fingerprints)
    assert (found.duplicates, found.freed) == (0, 2 * 4096)
    (held,) = holdings(owned, fingerprints)
    assert (held.merged, held.owners) == (("b", "c"), ("a",))
    nobodys = savings(assign(**{m: {"up": "base"} for m in "abc"}), fingerprints)
    assert (nobodys.duplicates, nobodys.freed) == (0, 2 * 4096)
    assert savings(assign(b={"up": "base"}, c={"up": "base"}), fingerprints).freed == 4096
