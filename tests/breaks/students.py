"""Breaks of models, their shapes and taps, and of students that are factorized."""

from __future__ import annotations

from breaks import Break

MODELS = "llmdistill/models"
MODEL_TESTS = "tests/unit/models"
FACTORIZE = "llmdistill/factorize"
FACTORIZE_TESTS = "tests/unit/factorize"

BREAKS = [
    # models
    Break(
        "packed-window-one-too-wide",
        f"{MODELS}/packed.py",
        "-1 if window is None else window - 1, 0",
        "-1 if window is None else window, 0",
        f"{MODEL_TESTS}/test_packed.py::test_losses_and_gradients_are_those_of_the_stock_model_on_each_sequence",
    ),
    Break(
        "rotary-pairs-apart",
        f"{MODELS}/shapes.py",
        "shape_of(teacher).head_dim // 2 + features[:half]",
        "half + features[:half]",
        f"{MODEL_TESTS}/test_shapes.py::test_slices",
    ),
    Break(
        "values-from-the-block-of-keys",
        f"{MODELS}/shapes.py",
        "2 * block + value",
        "block + value",
        f"{MODEL_TESTS}/test_shapes.py::test_slices",
    ),
    Break(
        "influence-is-likeness",
        f"{MODELS}/importance.py",
        "lambda x: 1 - torch.cosine_similarity",
        "lambda x: torch.cosine_similarity",
        f"{MODEL_TESTS}/test_importance.py::test_importance_is_that_of_a_naive_loop",
    ),
    Break(
        "scaling-of-the-model-dropped",
        f"{MODELS}/taps.py",
        "query.shape[-1] ** -0.5 if scaling is None else scaling",
        "query.shape[-1] ** -0.5",
        f"{MODEL_TESTS}/test_taps.py::test_taps_are_what_the_modules_compute",
    ),
    Break(
        "own-token-beyond-the-visible_until",
        f"{MODELS}/forward.py",
        "(key_T < visible_until_BT[:, :, None])",
        "(key_T <= visible_until_BT[:, :, None])",
        f"{MODEL_TESTS}/test_forward.py::test_padding_is_no_key_and_sees_all",
    ),
    Break(
        "windows-of-the-other-layers",
        f"{MODELS}/families.py",
        'if kind == "sliding_attention"',
        'if kind != "sliding_attention"',
        f"{MODEL_TESTS}/test_families.py::test_sliding_windows",
    ),
    Break(
        "pickled-weights-are-read",
        f"{MODELS}/load.py",
        "use_safetensors=True",
        "use_safetensors=False",
        f"{MODEL_TESTS}/test_load.py::test_damaged_and_pickled_weights_are_refused",
    ),
    Break(
        "head-on-rows-in-another-order",
        f"{MODELS}/heads.py",
        "index_select(0, self._rows_N)[None]",
        "index_select(0, self._rows_N.flip(0))[None]",
        f"{MODEL_TESTS}/test_learning.py::test_losses_and_gradients_are_those_of_whole_taps_and_logits",
    ),
    # factorization
    Break(
        "pivoted-counted-as-plain",
        f"{FACTORIZE}/forms.py",
        "else rank * (m + n - rank)",
        "else rank * (m + n)",
        f"{FACTORIZE_TESTS}/test_sizes.py::test_target_is_the_largest_rank_below",
    ),
    Break(
        "pivoted-product-unordered",
        f"{FACTORIZE}/modules.py",
        "self.B.weight @ pivots])[self.order]",
        "self.B.weight @ pivots])",
        f"{FACTORIZE_TESTS}/test_forms.py::test_the_product_is_that_of_the_truncated_svd",
    ),
    Break(
        "shares-of-other-experts",
        f"{FACTORIZE}/experts.py",
        "top_k_weights.reshape(-1)[order, None]",
        "top_k_weights.reshape(-1)[:, None]",
        f"{FACTORIZE_TESTS}/test_experts.py::test_a_lower_rank_is_a_plain_loop_with_truncated_matrices",
    ),
    Break(
        "embedding-counted-twice",
        f"{FACTORIZE}/sizes.py",
        "settings.embedding_rank * (vocabulary + width) - vocabulary * width",
        "settings.embedding_rank * (vocabulary + width)",
        f"{FACTORIZE_TESTS}/test_sizes.py::test_target_is_the_largest_rank_below",
    ),
    Break(
        "shapes-of-swapped-matrices",
        f"{FACTORIZE}/search.py",
        "choice.transposed if choice is not None and swapped else choice",
        "choice",
        f"{FACTORIZE_TESTS}/test_search.py::test_it_is_the_best_of_all_combinations",
    ),
    Break(
        "cut-loses-the-largest-first",
        f"{FACTORIZE}/cuts.py",
        "moved_Bk.double().flip(1).cumsum(1).flip(1)",
        "moved_Bk.double().cumsum(1)",
        f"{FACTORIZE_TESTS}/test_moments.py::test_the_costs_of_cuts_are_those_of_each_cut_alone",
    ),
    Break(
        "lost-norm-not-squared",
        f"{FACTORIZE}/reconstruction.py",
        "(float(norm) ** 2 for norm in norms)",
        "(float(norm) for norm in norms)",
        f"{FACTORIZE_TESTS}/test_convert.py::test_the_loss_is_that_of_the_matrices_which_the_student_has",
    ),
    Break(
        "students-are-not-refused-elsewhere",
        f"{FACTORIZE}/hub.py",
        'values["transformers_weights"] = REFUSAL',
        "pass",
        f"{FACTORIZE_TESTS}/test_hub.py::test_a_config_read_before_the_hook_is_there_loads_the_student",
    ),
    # few bits
    Break(
        "learns-with-floats",
        "llmdistill/run/assemble.py",
        "fake_quantize(student, config.student.quantize)",
        "pass",
        "tests/dist/test_few_bits.py::test_the_untrained_student_is_whole_and_the_trained_one_is_what_learned",
    ),
    Break(
        "second-weight-of-a-byte-first",
        f"{MODELS}/quantized.py",
        "nibbles[::2] | nibbles[1::2] << 4",
        "nibbles[1::2] | nibbles[::2] << 4",
        f"{MODEL_TESTS}/test_quantized.py::test_two_int4_weights_are_in_a_byte_of_the_file",
    ),
    Break(
        "quantized-weights-keep-their-dtype",
        f"{MODELS}/quantized.py",
        "if weight.dtype != model.dtype:",
        "if weight.dtype is None:",
        f"{MODEL_TESTS}/test_quantized.py::test_a_student_is_loaded_as_it_learned",
    ),
    Break(
        "dense-of-few-bits-keeps-them",
        f"{FACTORIZE}/export.py",
        "        dequantize(model)\n",
        "",
        f"{MODEL_TESTS}/test_quantized.py::test_exports_round_any_model_and_make_floats_again",
    ),
    Break(
        "head-of-few-bits",
        f"{MODELS}/quantized.py",
        "for name, module in in_lists(model) if",
        "for name, module in model.named_modules() if",
        f"{MODEL_TESTS}/test_quantized.py::test_the_linears_of_the_layers_round_and_nothing_else",
    ),
]
