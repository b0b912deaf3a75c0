from __future__ import annotations

import pytest
from transformers import LlamaConfig

from llmdistill.errors import UserError
from llmdistill.experiments.variants import from_starts, load_methods, load_starts, load_suite
from llmdistill.methods.makd import TERMS, MakdConfig, build_makd


def test_every_method_comes_from_every_start_under_a_key_of_its_own() -> None:
    methods = load_methods(["none", "makd"])
    assert [(each.key, each.title) for each in methods] == [("none", "untrained"), ("makd", "MaKD")]
    variants = from_starts(methods, load_starts(["loss", "plain"]))
    assert [each.key for each in variants] == ["none-loss", "makd-loss", "none-plain", "makd-plain"]
    assert variants[1].title == "MaKD from loss"
    assert [each.settings for each in variants] == [each.settings for each in [*methods, *methods]]
    with pytest.raises(UserError, match="loss is there twice"):
        load_starts(["loss", "loss"])


def test_former_names_of_suites_still_work() -> None:
    for number, name in enumerate(["makd-table3-decoder", "makd-table4-decoder", "makd-table5"], start=3):
        assert load_suite(f"table{number}") == load_suite(name)


def terms_of(settings: dict[str, object], num_layers: int = 12) -> tuple[set[str], object, object]:
    """The terms that are left, and the layers (1-based) of matrix and layer losses."""
    own = {key.removeprefix("makd."): value for key, value in settings.items() if key != "method"}
    config = LlamaConfig(num_hidden_layers=num_layers)
    method = build_makd(MakdConfig(**own), config, config)
    taps = method.student_taps
    matrix = sorted(layer + 1 for layer in taps.get("value", frozenset()))
    layer = sorted(layer + 1 for layer in taps.get("hidden", frozenset()))
    return set(method.weights), matrix, layer


LOWER, UPPER, ALL, NONE = list(range(1, 7)), list(range(7, 13)), list(range(1, 13)), []
MHA, FFN, LAYER = {"query", "key", "value"}, {"ffn_up", "ffn_gate", "ffn_down"}, {"attention", "hidden"}


def test_table3_leaves_out_what_its_rows_say() -> None:
    rows = {variant.name: terms_of(dict(variant.settings))[0] for variant in load_suite("makd-table3-decoder").variants}
    every = set(TERMS) - {"label"}
    assert rows == {
        "makd": every,
        "wo_matrix": every - MHA - FFN,
        "wo_mha": every - MHA,
        "wo_ffn": every - FFN,
        "wo_layer": every - LAYER,
        "wo_model": every - {"logits"},
    }


def test_table4_acts_where_its_rows_say() -> None:
    rows = [terms_of(dict(variant.settings)) for variant in load_suite("makd-table4-decoder").variants]
    matrix_alone = [(layers, NONE, False) for layers in (LOWER, UPPER, ALL)]
    layer_alone = [(NONE, layers, False) for layers in (LOWER, UPPER, ALL)]
    found = [(matrix, layer, "logits" in terms) for terms, matrix, layer in rows]
    assert found == [*matrix_alone, *layer_alone, (ALL, ALL, True), (LOWER, UPPER, True)]


def test_table5_has_the_papers_rows_and_figures() -> None:
    suite = load_suite("makd-table5")
    names = ["none", "sft", "kd", "kd_paper", "seqkd", "makd", "makd_paper"]
    assert [variant.name for variant in suite.variants] == names
    exact = {variant.name: variant for variant in suite.variants if variant.name.endswith("_paper")}
    assert exact["kd_paper"].settings["kd.ratio"] == 1.0
    assert terms_of(dict(exact["makd_paper"].settings)) == (set(TERMS) - {"label"}, LOWER, UPPER)
    assert not any(variant.grid for variant in exact.values())
    config = LlamaConfig(num_hidden_layers=12)
    own = {key.removeprefix("makd."): value for key, value in exact["makd_paper"].settings.items() if key != "method"}
    weights = build_makd(MakdConfig(**own), config, config).weights
    assert set(weights.values()) == {1.0}, "eq. 19 adds up the terms"
    for rows in suite.paper.values():
        assert list(rows) == ["teacher", "none", "sft", "kd", "seqkd", "makd"]
    # The averages as printed in the paper.
    printed = {"gpt2": [15.18, 6.46, 11.34, 11.41, 11.67, 13.53], "llama": [21.42, 0.67, 11.76, 11.96, 12.11, 15.24]}
    for model, averages in printed.items():
        for row, average in zip(suite.paper[model].values(), averages, strict=True):
            assert sum(row.values()) / 3 == pytest.approx(average, abs=0.011)
