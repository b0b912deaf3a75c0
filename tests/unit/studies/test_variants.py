import pytest
from transformers import LlamaConfig

from llmdistill.methods.makd import TERMS, MakdConfig, build_makd
from llmdistill.studies.variants import load_method_table


def test_former_names_of_suites_still_work() -> None:
    for number, name in enumerate(["makd-table3-decoder", "makd-table4-decoder", "makd-table5"], start=3):
        assert load_method_table(f"table{number}") == load_method_table(name)


def terms_of(variant):
    """The terms that are left with their weights, and the layers (1-based) of matrix and layer losses."""
    own = {key.removeprefix("makd."): value for key, value in variant.settings.items() if key != "method"}
    config = LlamaConfig(num_hidden_layers=12)
    method = build_makd(MakdConfig(**own), config, config)
    matrix, layer = (sorted(each + 1 for each in method.student_taps.get(tap, ())) for tap in ("value", "hidden"))
    return dict(method.weights), matrix, layer


LOWER, UPPER, ALL, NONE = list(range(1, 7)), list(range(7, 13)), list(range(1, 13)), []
MHA, FFN, LAYER = {"query", "key", "value"}, {"ffn_up", "ffn_gate", "ffn_down"}, {"attention", "hidden"}


def test_table3_leaves_out_what_its_rows_say() -> None:
    rows = {variant.name: set(terms_of(variant)[0]) for variant in load_method_table("makd-table3-decoder").variants}
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
    rows = [terms_of(variant) for variant in load_method_table("makd-table4-decoder").variants]
    matrix_alone = [(layers, NONE, False) for layers in (LOWER, UPPER, ALL)]
    layer_alone = [(NONE, layers, False) for layers in (LOWER, UPPER, ALL)]
    found = [(matrix, layer, "logits" in terms) for terms, matrix, layer in rows]
    assert found == [*matrix_alone, *layer_alone, (ALL, ALL, True), (LOWER, UPPER, True)]


def test_table5_has_the_papers_rows_and_figures() -> None:
    table = load_method_table("makd-table5")
    names = ["none", "sft", "kd", "kd_paper", "seqkd", "makd", "makd_paper"]
    assert [variant.name for variant in table.variants] == names
    exact = {variant.name: variant for variant in table.variants if variant.name.endswith("_paper")}
    assert exact["kd_paper"].settings["kd.ratio"] == 1.0
    sum_of_terms = dict.fromkeys(set(TERMS) - {"label"}, 1.0)  # eq. 19
    assert terms_of(exact["makd_paper"]) == (sum_of_terms, LOWER, UPPER)
    assert not any(variant.grid for variant in exact.values())
    for rows in table.paper.values():
        assert list(rows) == ["teacher", "none", "sft", "kd", "seqkd", "makd"]
    # The averages as printed in the paper.
    printed = {"gpt2": [15.18, 6.46, 11.34, 11.41, 11.67, 13.53], "llama": [21.42, 0.67, 11.76, 11.96, 12.11, 15.24]}
    for model, averages in printed.items():
        for row, average in zip(table.paper[model].values(), averages, strict=True):
            assert sum(row.values()) / 3 == pytest.approx(average, abs=0.011)
