"""Public failures of people who merge, evaluate and serve checkpoints: by number the tests that show what happens here.

A test is named as pytest names it below tests/, without the parameters where all of its cases belong.
"""

_REFUSED = "hostile/test_refused.py::test_a_bad_checkpoint_is_one_clear_error"
_ACCEPTED = "hostile/test_accepted.py::test_it_answers_as_the_original_with_shared_tensors_in_place"
_SIDED = f"{_ACCEPTED}[27 unsloth#5386, 28 transformers#29988, 41 kubernetes-manifests#2517 (sided)]"
_FILES = "hostile/test_accepted.py::test_every_other_file_has_the_owners_bytes_and_none_is_a_link"
_LIKE = "hostile/test_accepted.py::test_only_projections_are_shared_and_only_with_their_like"
_KEY = "checkpoints/test_meaning.py::test_a_field_that_changes_an_answer_is_in_the_key_and_no_other_is"

FAILURES: dict[int, tuple[str, ...]] = {
    1: (f"{_REFUSED}[1 transformers#42612]",),
    2: (f"{_REFUSED}[2 vllm#53020]",),
    3: (f"{_ACCEPTED}[3 mergekit#350 (tied)]", "hostile/test_accepted.py::test_a_tied_head_is_counted_once"),
    5: (f"{_ACCEPTED}[5 llama.cpp#9211 (stripped)]",),
    6: (f"{_REFUSED}[6 vllm#15031]",),
    7: (f"{_REFUSED}[7 mergekit#398]", f"{_ACCEPTED}[8 ANEForge#253 (biased)]"),
    8: (
        f"{_REFUSED}[8 ANEForge#253, biases dropped]",
        f"{_REFUSED}[8 candle-vllm#167, a bias ignored]",
        f"{_ACCEPTED}[8 ANEForge#253 (biased)]",
    ),
    10: (f"{_ACCEPTED}[10 vllm#1977, 38 mergekit#85 (buffers)]",),
    11: (f"{_REFUSED}[11 peft#894]",),
    13: (_LIKE, f"{_ACCEPTED}[13 mergekit#325 (far)]", _KEY),
    14: (
        f"{_REFUSED}[14 DeepSpeed#8345, two ropes]",
        f"{_ACCEPTED}[14 DeepSpeed#8345 (spelled)]",
        "checkpoints/test_architecture.py::test_both_spellings_of_a_rope_are_one",
    ),
    15: (
        "checkpoints/test_architecture.py::test_the_window_is_that_of_the_layer",
        f"{_KEY}[qwen3]",
        "deploy/test_spec.py::test_windows_and_rounding_are_said",
    ),
    17: (f"{_REFUSED}[17 sglang#34529]", f"{_REFUSED}[gpt_neox]"),
    18: (
        f"{_ACCEPTED}[18 vllm#36997, one by one (experts)]",
        f"{_ACCEPTED}[18 MoE-Infinity#110, all at once (stacked)]",
        f"{_REFUSED}[18 vllm#36997, half of the experts stacked]",
    ),
    19: (f"{_REFUSED}[19 MoE-Infinity#109]",),
    20: (
        f"{_ACCEPTED}[20 mergekit#324 (large)]",
        _LIKE,
    ),
    21: (f"{_ACCEPTED}[21 unsloth#219 (gemma)]", _LIKE),
    22: (f"{_ACCEPTED}[22 fusion_bench#215, 24 mergekit#425 (rows)]", _LIKE),
    23: (
        f"{_ACCEPTED}[23 mergekit#169 (permuted)]",
        "preflight/test_checks.py::test_tokenizers_are_compared_by_what_they_map_not_by_size",
        "grouping/test_besides.py::test_other_tokens_keep_tables_apart_and_nothing_else",
    ),
    24: (
        f"{_ACCEPTED}[22 fusion_bench#215, 24 mergekit#425 (rows)]",
        "grouping/test_besides.py::test_padded_rows_are_rows_like_others",
    ),
    25: (f"{_REFUSED}[25 mergekit#73]",),
    27: (_SIDED, f"{_FILES}[sided]"),
    28: (_SIDED, f"{_FILES}[sided]"),
    29: (f"{_REFUSED}[29 mlx-vlm#1464]",),
    30: (f"{_REFUSED}[30 sglang#32279, a shard forgotten]", f"{_REFUSED}[30 CoSER#3, a shard missing]"),
    31: (f"{_REFUSED}[31 huggingface_hub#4728]",),
    34: (f"{_REFUSED}[34 rank_llm#398]",),
    35: (f"{_REFUSED}[35 OmniParser#34]",),
    36: (f"{_REFUSED}[36 InvokeAI#7009]", "hostile/test_checkpoints.py::test_the_size_of_a_truncated_file_is_told"),
    38: (
        f"{_ACCEPTED}[10 vllm#1977, 38 mergekit#85 (buffers)]",
        "serving/test_sharing.py::test_aliases_change_no_answer",
    ),
    39: (
        "hostile/test_exports.py::test_a_killed_export_leaves_nothing_half_made_and_the_next_gives_the_same_bytes",
        "hostile/test_serving.py::test_a_file_that_is_replaced_while_it_is_mapped_is_not_seen",
        "hostile/test_checkpoints.py::test_weights_that_change_between_look_and_scan",
    ),
    40: (
        "hostile/test_accepted.py::test_one_write_through_a_link_is_found_in_every_model_that_has_it",
        "test_export.py::test_everything_is_read_only",
    ),
    41: (
        f"{_REFUSED}[41 kubernetes-manifests#2517]",
        _SIDED,
        f"{_FILES}[sided]",
    ),
    42: (
        "test_export.py::test_a_full_disk_is_one_clear_error",
        "preflight/test_checks.py::test_room_on_the_disk",
        "hostile/test_evaluation.py::test_a_disk_that_fills_within_a_line",
    ),
    43: (
        "hostile/test_exports.py::test_a_killed_export_leaves_nothing_half_made_and_the_next_gives_the_same_bytes",
        "pipelines/test_line.py::test_killed_in_the_middle_and_run_again_gives_the_same_bytes",
    ),
    46: (
        "test_merging.py::test_one_mean_in_fp32_keeps_what_steps_in_bf16_lose",
        "test_merging.py::test_order_is_the_recipes_not_the_askers",
    ),
    47: (
        f"{_REFUSED}[47 peft#1001]",
        "test_merging.py::test_what_is_not_finite_is_refused",
        "test_merging.py::test_a_mean_that_only_the_cast_makes_infinite_is_refused",
        "hostile/test_evaluation.py::test_weights_that_answer_with_nan_are_wrong_and_an_original_is_refused",
    ),
    48: (f"{_REFUSED}[48 llama.cpp#12923]", f"{_REFUSED}[GPTQ]", f"{_REFUSED}[MXFP4]"),
    50: (
        "pipelines/test_rebuilds.py::test_a_life_of_a_pool",
        "evaluation/test_evaluator.py::test_other_settings_are_another_score",
        "evaluation/test_evaluator.py::test_another_task_is_another_score",
    ),
    51: (
        "evaluation/test_evaluator.py::test_noise_floor_is_how_far_the_same_weights_move_in_other_batches",
        "evaluation/test_evaluator.py::test_a_budget_within_the_noise_is_refused",
    ),
    53: (
        "evaluation/test_evaluator.py::test_answers_equal_simple_evaluate",
        "hostile/test_evaluation.py::test_sampling_is_refused",
    ),
    54: (
        "hostile/test_pool_files.py::test_names_that_are_no_slugs",
        "pools/test_pool.py::test_names_that_only_differ_in_punctuation_collide",
        "deploy/test_spec.py::test_a_pool_that_only_fits_when_shared_is_not_promised_to_stock_vllm",
        "pipelines/test_line.py::test_killed_in_the_middle_and_run_again_gives_the_same_bytes",
    ),
}
