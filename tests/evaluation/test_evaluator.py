"""Scores equal lm-eval's own, whatever was scored before; weights are swapped and restored byte for byte."""

from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from sandhi_core.assignment import Assignment
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation.evaluator import Evaluator, Weights, merged_weights, score_directory, weights_key
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.evaluation.tasks import SPLITS
from sandhi_core.pools.pool import ModelEntry
from sandhi_core.store import Store
from tests.evaluation.local_tasks import choice_task, entry, generation_task, settings
from tests.models import BUILDERS, edit_tensors, tiny_llama

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def evaluator(tmp_path: Path, model: Path, asked: ModelEntry, log: str = "log", **changes: Any) -> Evaluator:
    (tmp_path / "scans").mkdir(exist_ok=True)
    return Evaluator(
        model,
        fingerprint(Checkpoint.open(model, "m"), tmp_path / "scans"),
        asked,
        settings(Path(changes.pop("include_path", tmp_path / "tasks")), **changes),
        ScoreLog(tmp_path / log),
        tmp_path / "cache",
    )


def replaced(key: str, tensors: dict[str, Tensor]) -> Weights:
    """Weights with these tensors, read from the dictionary; each is named by its place in memory."""
    return Weights(key, {name: str(id(tensor)) for name, tensor in tensors.items()}, tensors.__getitem__)


def reference(model: Path, folder: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """lm_eval.simple_evaluate with its own HF model: by document id."""
    monkeypatch.chdir(folder)  # lm-eval finds data files from the current directory only
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm = HFLM(pretrained=loaded, tokenizer=transformers.AutoTokenizer.from_pretrained(model), batch_size=3)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        lm, tasks=[task], task_manager=manager, fewshot_random_seed=42, bootstrap_iters=0, log_samples=True
    )
    return {sample["doc_id"]: sample for sample in found["samples"][task]}


@pytest.mark.parametrize(
    ("task", "metric", "overrides"),
    [
        ("letters", "acc", {}),
        ("letters", "acc_norm", {}),
        ("letters", "acc", {"num_fewshot": 2, "fewshot_split": "test"}),
        ("copy", "exact_match", {}),
    ],
)
@pytest.mark.filterwarnings("ignore")  # simple_evaluate's own
def test_answers_equal_simple_evaluate(
    tmp_path: Path, model: Path, task: str, metric: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = generation_task(tmp_path / "tasks") if task == "copy" else choice_task(tmp_path / "tasks", **overrides)
    scorer = evaluator(tmp_path, model, entry(model, (task, metric)))
    expected = reference(model, folder, task, monkeypatch)
    compared = 0
    for split in SPLITS:
        found = scorer.evaluate(split, Weights(weights_key("f", {}))).tasks[task]
        (suite_task,) = scorer.suite.tasks
        for question, value in zip(suite_task.questions[split], found.questions, strict=True):
            sample = expected[question.requests[0].doc_id]
            assert value == float(sample[metric])
            for request, response in zip(question.requests, sample["filtered_resps"], strict=True):
                ours = request.filtered_resps["none"]
                if task == "copy":
                    assert ours == response
                else:
                    assert abs(ours[0] - response[0]) < 1e-4
            compared += 1
        assert found.value == pytest.approx(sum(found.questions) / len(found.questions))
    assert compared == len(expected)


def test_swapping_and_going_back_leaves_every_byte_and_score_as_it_was(tmp_path: Path, model: Path) -> None:
    choice_task(tmp_path / "tasks")
    scorer = evaluator(tmp_path, model, entry(model, ("letters", "acc")))
    first = scorer.evaluate("search", Weights("original"))
    assert scorer.resident is not None
    before = {n: p.clone() for n, p in scorer.resident.model.named_parameters()}
    zeroed = {Q_PROJ: torch.zeros(32, 32, dtype=torch.bfloat16), Q_PROJ.replace("1", "0"): torch.ones(32, 32)}
    scorer.evaluate("search", replaced("zeroed", zeroed))
    assert torch.equal(scorer.resident.model.get_parameter(Q_PROJ), torch.zeros(32, 32))
    scorer.evaluate("search", replaced("one of them", {Q_PROJ: zeroed[Q_PROJ]}))
    assert torch.equal(scorer.resident.model.get_parameter(Q_PROJ.replace("1", "0")), before[Q_PROJ.replace("1", "0")])
    again = scorer.evaluate("search", Weights("original once more"))
    assert again.tasks == first.tasks
    assert all(torch.equal(p, before[n]) for n, p in scorer.resident.model.named_parameters())


def test_the_checkpoint_is_never_written(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", dtype=torch.float32)  # kept as a view of the file
    choice_task(tmp_path / "tasks")
    before = (model / "model.safetensors").read_bytes()
    scorer = evaluator(tmp_path, model, entry(model, ("letters", "acc")))
    scorer.evaluate("search", replaced("ones", {Q_PROJ: torch.ones(32, 32)}))
    assert (model / "model.safetensors").read_bytes() == before


def test_a_score_is_made_once_for_ever(tmp_path: Path, model: Path) -> None:
    choice_task(tmp_path / "tasks")
    asked = entry(model, ("letters", "acc"))
    first = evaluator(tmp_path, model, asked)
    made = first.evaluate("search", Weights("w"))
    second = evaluator(tmp_path, model, asked)
    assert second.evaluate("search", Weights("w", {Q_PROJ: "0"}, lambda name: pytest.fail(f"{name} was read"))) == made
    assert (first.evaluations, second.evaluations) == (1, 0)
    assert second.resident is None


@pytest.mark.parametrize(
    "changes", [{"seed": 7}, {"batch_tokens": 64}, {"dtype": "bfloat16"}, {"splits": {"profile": 0.4, "search": 0.2}}]
)
def test_other_settings_are_another_score(tmp_path: Path, model: Path, changes: dict[str, Any]) -> None:
    choice_task(tmp_path / "tasks")
    asked = entry(model, ("letters", "acc"))
    evaluator(tmp_path, model, asked).evaluate("search", Weights("w"))
    other = evaluator(tmp_path, model, asked, **changes)
    other.evaluate("search", Weights("w"))
    assert other.evaluations == 1


@pytest.mark.parametrize("changed", ["task", "data", "metric", "few-shot"])
def test_another_task_is_another_score(tmp_path: Path, model: Path, changed: str) -> None:
    folder = choice_task(tmp_path / "tasks")
    asked = entry(model, ("letters", "acc"))
    evaluator(tmp_path, model, asked).evaluate("search", Weights("w"))
    match changed:
        case "task":
            choice_task(folder, target_delimiter="")
        case "data":
            data = folder / "letters.jsonl"
            data.write_text(data.read_text().replace(" then", " next"))
        case "metric":
            asked = entry(model, ("letters", "acc_norm"))
        case "few-shot":
            choice_task(folder, num_fewshot=1, fewshot_split="test")
    other = evaluator(tmp_path, model, asked)
    other.evaluate("search", Weights("w"))
    assert other.evaluations == 1


def test_threads_are_set_before_a_model_is_loaded(tmp_path: Path, model: Path) -> None:
    choice_task(tmp_path / "tasks")
    before = torch.get_num_threads()
    try:
        made = evaluator(tmp_path, model, entry(model, ("letters", "acc")), threads=before + 1)
        assert torch.get_num_threads() == before + 1 and made.resident is None
    finally:
        torch.set_num_threads(before)


def test_threads_and_the_folder_of_the_tasks_do_not_make_another_score(tmp_path: Path, model: Path) -> None:
    asked = entry(model, ("letters", "acc"))
    choice_task(tmp_path / "tasks")
    made = evaluator(tmp_path, model, asked).evaluate("search", Weights("w"))
    moved = str((tmp_path / "tasks").rename(tmp_path / "moved"))
    threads = torch.get_num_threads()
    other = evaluator(tmp_path, model, asked, include_path=moved, threads=threads)
    assert other.evaluate("search", Weights("w")) == made
    assert other.evaluations == 0


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_the_original_scores_the_same_whatever_was_scored_before(tmp_path: Path, model: Path, metric: str) -> None:
    generation_task(choice_task(tmp_path / "tasks"))
    asked = entry(model, ("letters", metric), ("copy", "exact_match"))
    first = evaluator(tmp_path, model, asked, "log 1").evaluate("search", Weights("w"))
    other = evaluator(tmp_path, model, asked, "log 2")
    other.evaluate("profile", replaced("noise", {Q_PROJ: torch.randn(32, 32)}))
    other.evaluate("holdout", Weights("w"))
    other.evaluate("search", replaced("ones", {Q_PROJ: torch.ones(32, 32)}))
    assert other.evaluate("search", Weights("w")) == first
    assert other.evaluations == 4


def test_only_what_is_not_in_place_is_read(tmp_path: Path, model: Path) -> None:
    choice_task(tmp_path / "tasks")
    scorer = evaluator(tmp_path, model, entry(model, ("letters", "acc")))
    read: list[str] = []

    def zeros(name: str) -> Tensor:
        read.append(name)
        return torch.zeros(32, 32)

    other = Q_PROJ.replace("1", "0")
    scorer.evaluate("search", Weights("a", {Q_PROJ: "0"}, zeros))
    scorer.evaluate("search", Weights("b", {Q_PROJ: "0", other: "0"}, zeros))
    scorer.evaluate("search", Weights("b", {Q_PROJ: "0", other: "0"}, zeros))
    assert read == [Q_PROJ, other]
    scorer.evaluate("search", Weights("c", {other: "1"}, zeros))
    scorer.evaluate("search", Weights("d", {Q_PROJ: "0"}, zeros))
    assert read == [Q_PROJ, other, other, Q_PROJ]


def test_merged_weights_are_read_from_the_store(tmp_path: Path, model: Path) -> None:
    choice_task(tmp_path / "tasks")
    store = Store(tmp_path / "store")
    shared = torch.randn(32, 32).to(torch.bfloat16)
    scorer = evaluator(tmp_path, model, entry(model, ("letters", "acc")))
    identity = fingerprint(Checkpoint.open(model, "m"), tmp_path / "scans")
    weights = merged_weights(identity, Assignment({Q_PROJ: store.put(Q_PROJ, shared)}), store)
    scorer.evaluate("search", weights)
    assert scorer.resident is not None
    assert torch.equal(scorer.resident.model.get_parameter(Q_PROJ), shared.float())
    assert merged_weights(identity, Assignment(), store).key == weights_key(identity.digest, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_goes_back_to_its_original_bytes(tmp_path: Path, model: Path, dtype: str) -> None:
    choice_task(tmp_path / "tasks")
    scorer = evaluator(tmp_path, model, entry(model, ("letters", "acc")), dtype=dtype)
    scorer.evaluate("search", replaced("ones", {Q_PROJ: torch.ones(32, 32)}))
    scorer.evaluate("search", Weights("w"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    assert scorer.resident is not None
    for (name, ours), (_, stock) in zip(
        scorer.resident.model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert ours.dtype == stock.dtype and torch.equal(ours, stock), name


def test_names_without_the_prefix_of_transformers(tmp_path: Path, model: Path) -> None:
    """Checkpoints written from a bare decoder lack `model.`."""

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(model, strip)
    choice_task(tmp_path / "tasks")
    scorer = evaluator(tmp_path, model, entry(model, ("letters", "acc")))
    scorer.evaluate("search", replaced("ones", {Q_PROJ.removeprefix("model."): torch.ones(32, 32)}))
    assert scorer.resident is not None
    assert torch.equal(scorer.resident.model.get_parameter(Q_PROJ), torch.ones(32, 32))


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_every_model_type_is_held_and_goes_back(tmp_path: Path, build: Any) -> None:
    """Whatever slot the architecture's table names can be replaced under stock transformers."""
    model = build(tmp_path / "model")
    choice_task(tmp_path / "tasks")
    scorer = evaluator(tmp_path, model, entry(model, ("letters", "acc")))
    checkpoint = Checkpoint.open(model, "m")
    slots = fingerprint(checkpoint, tmp_path / "scans").slots
    first = scorer.evaluate("search", Weights("w"))
    half = {slot.tensor: checkpoint.tensor(slot.tensor) / 2 for slot in slots}
    assert scorer.evaluate("search", replaced("half", half)).weights == "half"
    again = scorer.evaluate("search", Weights("w once more"))
    assert half and again.tasks == first.tasks


def test_a_directory_is_scored_as_its_weights_are(tmp_path: Path, model: Path) -> None:
    choice_task(tmp_path / "tasks")
    asked = entry(model, ("letters", "acc"))
    expected = evaluator(tmp_path, model, asked).evaluate("holdout", Weights("w"))
    found = score_directory(model, asked, settings(tmp_path / "tasks"), "holdout", tmp_path / "cache")
    assert found == expected.tasks


def test_weights_of_other_names_or_digests_are_other_weights() -> None:
    keys = {weights_key("f", {}), weights_key("g", {}), weights_key("f", {"a": "1"}), weights_key("f", {"b": "1"})}
    assert len(keys) == 4
    assert weights_key("f", {"a": "1", "b": "2"}) == weights_key("f", {"b": "2", "a": "1"})


def likelihood_task(folder: Path) -> Path:
    """Judged by the log-likelihood of the first choice, which floating-point noise moves."""
    choice_task(folder, "likely")
    (folder / "likely.py").write_text("def process(doc, results):\n    return {'likely': results[0][0]}\n")
    text = (folder / "likely.yaml").read_text().replace("metric: acc_norm", "metric: likely")
    (folder / "likely.yaml").write_text(text + "process_results: !function likely.process\n")
    return folder


def test_noise_floor_is_how_far_the_same_weights_move_in_other_batches(tmp_path: Path, model: Path) -> None:
    choice_task(likelihood_task(tmp_path / "tasks"))
    asked = entry(model, ("likely", "likely"), ("letters", "acc"))
    scorer = evaluator(tmp_path, model, asked, batch_tokens=32)
    floor = scorer.noise_floor("search")
    assert 0.0 < floor["likely"] < 1e-4 and floor["letters"] == 0.0 and scorer.evaluations == 2
    again = evaluator(tmp_path, model, asked, batch_tokens=32)
    assert again.noise_floor("search") == floor and again.evaluations == 0


def test_a_budget_within_the_noise_is_refused(tmp_path: Path, model: Path) -> None:
    likelihood_task(tmp_path / "tasks")
    scorer = evaluator(tmp_path, model, entry(model, ("likely", "likely"), budget=1e-300), batch_tokens=32)
    with pytest.raises(EvaluationError, match=r"the budget of 1e-300 .* no larger than what floating-point noise"):
        scorer.noise_floor("search")
    scorer = evaluator(tmp_path, model, entry(model, ("likely", "likely")), batch_tokens=32)
    with pytest.raises(EvaluationError, match=r"the search tolerance of 1e-300 .* no larger than what floating-point"):
        scorer.noise_floor("search", {"likely": 1e-300})


def test_no_answer_is_never_the_best_answer(tmp_path: Path, model: Path) -> None:
    """0, which a NaN counts by lm-eval's own metrics, is more than any log-likelihood."""
    likelihood_task(tmp_path / "tasks")
    scorer = evaluator(tmp_path, model, entry(model, ("likely", "likely")))
    scorer.evaluate("search", Weights("original"))
    with pytest.raises(EvaluationError, match="'likely' has no worst value"):
        scorer.evaluate("search", replaced("broken", {Q_PROJ: torch.full((32, 32), torch.nan)}))
