from dataclasses import replace
from typing import Any

import numpy as np
import torch
from references import terms_of
from tiny import tiny_config

from llmdistill import losses
from llmdistill.batch import Batch, Outputs, Taps
from llmdistill.methods import METHODS, build_method
from llmdistill.methods.distilbert import DistilbertConfig
from llmdistill.methods.kd import KdConfig
from llmdistill.methods.minilm import MinilmConfig
from llmdistill.methods.minilmv2 import Minilmv2Config
from llmdistill.methods.tinybert import TinybertConfig

SETTINGS: dict[str, Any] = {"kd": KdConfig(), "minilm": MinilmConfig(value_mse=0.5), "tinybert": TinybertConfig()}


def test_terms_are_those_of_all_methods(models) -> None:
    pair = models.Pair(models.llama(3, 16, 4, 2), models.llama(2, 8, 4, 1))
    names = ["tinybert", "minilm", "kd", "sft"]
    parts = {name: METHODS[name].build(SETTINGS.get(name), pair.teacher_config, pair.student_config) for name in names}
    method = build_method(names, SETTINGS, pair.teacher_config, pair.student_config)
    assert method.weights == {
        "tinybert.attention": 1.0,
        "hidden": 1.0,
        "embedding": 1.0,
        "minilm.attention": 1.0,
        "value_relation": 1.0,
        "value_mse": 0.5,
        "forward_kl": 0.5,
        "kd.label": 0.5,
        "sft.label": 1.0,
    }
    assert method.positions["kd.label"] == method.positions["forward_kl"] == "labels"
    assert method.positions["minilm.attention"] == "tokens"
    # TinyBERT's layers 2 and 3, and MiniLM's last.
    both, of_layers = {0, 1}, {aspect: {1, 2} for aspect in ("query", "key", "hidden")}
    assert method.student_taps == {**dict.fromkeys(of_layers, both), "embedding": {0}, "value": {1}}
    assert method.teacher_taps == {**of_layers, "embedding": {0}, "value": {2}}
    assert method.projections == {"hidden": (8, 16), "embedding": (8, 16), "value": (2, 8)}
    run = pair.run(method)
    together = {name: term.sum for name, term in terms_of(method, run.student, run.teacher, pair.batch).items()}
    alone = {
        name if name in together else f"{part}.{name}": term.sum
        for part, each in parts.items()
        for name, term in terms_of(each, run.student, run.teacher, pair.batch).items()
    }
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_the_students_own_answers_are_no_labels() -> None:
    labels, config = torch.tensor([[-100, 2, 3], [-100, -100, 1]]), tiny_config("llama")
    batch = Batch(labels.clamp_min(0), torch.ones_like(labels), labels)
    student, teacher = (Outputs(logits, Taps()) for logits in torch.randn(2, 2, 3, 5))
    own = replace(batch, labels_are="samples")
    assert own.to("cpu").labels_are == "samples"
    method = build_method(["kd"], SETTINGS, config, config)
    given, written = (terms_of(method, student, teacher, each) for each in (batch, own))
    assert written.keys() == {"forward_kl"} < given.keys()
    torch.testing.assert_close(written["forward_kl"].sum, given["forward_kl"].sum)
    alone = build_method(["kd"], {"kd": KdConfig(ratio=1.0)}, config, config)
    assert alone.weights == {"forward_kl": 1.0}
    assert terms_of(alone, student, teacher, batch).keys() == {"forward_kl"}


def test_a_sampled_divergence_takes_all_tokens_of_given_answers() -> None:
    labels, config = torch.tensor([[-100, 2, 3]]), tiny_config("llama")
    batch = Batch(labels.clamp_min(0), torch.ones_like(labels), labels)
    method = build_method(["kd"], {"kd": KdConfig(ratio=1.0, divergence="log_ratio")}, config, config)
    for kind, divergence in (("answers", losses.REVERSE_KL), ("samples", losses.LOG_RATIO)):
        (term,) = method.bind_terms(Outputs(None, Taps()), replace(batch, labels_are=kind)).token_terms
        assert (term.name, term.divergence) == ("log_ratio", divergence)


def test_defaults_that_no_recipe_repeats_are_those_of_the_papers() -> None:
    assert (KdConfig().alpha, KdConfig().beta) == (0.1, 0.5)  # DistiLLM, and the Jensen-Shannon divergence
    assert Minilmv2Config().relation_heads == 48  # of the paper's base-size teachers


def test_a_factor_is_rounded_once() -> None:
    """Several ranks and steps of accumulation would else differ from one large batch in the last digit."""
    config, batch = tiny_config("llama"), Batch(*torch.ones(3, 1, 2, dtype=torch.long))
    method = build_method(["kd"], {"kd": KdConfig(ratio=0.3)}, config, config)
    for count in range(1, 200):
        factors = method.bind_terms(Outputs(None, Taps()), batch, {"labels": torch.tensor(count)}).factors
        for name, weight in method.weights.items():
            assert factors[name].item() == np.float32(weight) / np.float32(count)


def test_a_teacher_is_needed_if_one_method_needs_it(models) -> None:
    config = models.bert(2, 16, 4, 4)
    labels_alone = {"distilbert": DistilbertConfig(soft=0.0, cosine=0.0)}
    method = build_method(["distilbert", "sft"], labels_alone, config, config)
    assert not method.needs_teacher
    assert list(method.weights) == ["distilbert.label", "sft.label"]
    assert build_method(["distilbert", "kd"], {**labels_alone, "kd": KdConfig()}, config, config).needs_teacher
