import pytest
import torch
from tiny import WORDS, tiny_config, tiny_model
from transformers import BertConfig, PreTrainedModel

from llmdistill.models.load import build_meta
from llmdistill.runtime import speed
from llmdistill.runtime.speed import measure_speed, parameter_split
from llmdistill.students.counting import count_parameters
from llmdistill.students.install import install
from llmdistill.students.kinds import Factorization


@pytest.mark.parametrize(("depth", "width", "embedding", "transformer"), [(12, 768, 23.4, 85.1), (3, 384, 11.7, 5.3)])
def test_parameters_of_minilm_table_4(depth, width, embedding, transformer):
    config = BertConfig(num_hidden_layers=depth, hidden_size=width, intermediate_size=4 * width, num_attention_heads=12)
    split = parameter_split(build_meta(config))
    assert (round(split["embedding"] / 1e6, 1), round(split["transformer"] / 1e6, 1)) == (embedding, transformer)


def test_heads_are_neither_embedding_nor_transformer():
    for name, is_tied, other in (
        # Positions, token types and a norm, and the head.
        ("bert", True, (40 + 2 + 2) * 16 + 16 * 16 + 16 + 2 * 16 + WORDS),
        ("gpt2", True, 40 * 16 + 2 * 16),
        ("llama", True, 16),
        ("llama", False, 16 + WORDS * 16),
    ):
        split = parameter_split(model := tiny_model(name, tie_word_embeddings=is_tied))
        assert (split["embedding"], split["other"]) == (WORDS * 16, other)
        assert split["total"] == split["embedding"] + split["transformer"] + split["other"] == count_parameters(model)


@pytest.mark.parametrize(("kind", "name"), [("bert", "encoder.layer.1.intermediate.dense"), ("gpt2", "h.1.mlp.c_fc")])
def test_factors_count_as_what_they_stand_for(kind, name):
    model = build_meta(tiny_config(kind))
    dense = parameter_split(model)
    install(model, Factorization(sizes={name: 3}, embedding=5))
    split = parameter_split(model)
    assert split["embedding"] == WORDS * 5 + 5 * 16
    assert split["transformer"] == dense["transformer"] - 16 * 24 + 3 * (16 + 24)
    assert split["other"] == dense["other"]
    assert split["total"] == count_parameters(model)
    for parameter in model.parameters():  # as DeepSpeed partitions it
        parameter.ds_numel = 10 * parameter.numel()
    assert parameter_split(model) == {key: 10 * value for key, value in split.items()}


class Stage:
    """A clock that only forward passes move, by durations laid down for each model and batch size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, durations: dict[str, dict[int, list[float]]]) -> None:
        self.now = 0.0
        self.calls = []
        self.states: list[tuple[bool, bool]] = []
        monkeypatch.setattr(speed, "timer", lambda: self.now)
        self.models = {name: self._model(name, plan) for name, plan in durations.items()}

    def _model(self, name: str, plan: dict[int, list[float]]) -> PreTrainedModel:
        model = tiny_model("gpt2", vocab_size=WORDS + 6) if name == "causal" else tiny_model("bert")
        waiting = {size: iter(times) for size, times in plan.items()}

        def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor, **more) -> None:
            assert attention_mask.shape == input_ids.shape
            assert attention_mask.all()
            self.calls.append((name, input_ids, more))
            self.states.append((model.training, torch.is_inference_mode_enabled()))
            self.now += next(waiting[len(input_ids)])

        model.forward = forward
        return model


def test_models_take_turns_on_the_same_tokens_and_the_clock_says_their_speed(monkeypatch):
    first = {1: [99, 4, 1, 2, 3, 50], 4: [99, 8, 8, 8, 8, 8]}
    second = {1: [99, 0.5, 0.5, 0.5, 1, 1], 4: [99, 2, 1, 9, 3, 4]}
    stage = Stage(monkeypatch, {"teacher": first, "causal": second})
    stage.models["teacher"].train()
    stage.models["causal"].eval()
    found = measure_speed(stage.models, batch_size=4, length=7, repeats=5, warmup=1)
    # Quartiles of 1 2 3 4 50 are 2 and 4, those of 1 2 3 4 9 are 2 and 4.
    assert found["teacher"]["latency"] == {"median": 3, "iqr": 2}
    assert found["teacher"]["batch"] == {"median": 8, "iqr": 0}
    assert found["causal"]["latency"] == {"median": 0.5, "iqr": 0.5}
    assert found["causal"]["batch"] == {"median": 3, "iqr": 2}
    assert [found[name]["throughput"] for name in found] == [4 / 8, 4 / 3]
    assert [found[name]["speedup"] for name in found] == [1, pytest.approx(8 / 3)]
    assert [found[name]["latency_speedup"] for name in found] == [1, 6]

    assert [name for name, _, _ in stage.calls] == ["teacher", "causal"] * 12
    assert [tuple(ids.shape) for _, ids, _ in stage.calls] == [(1, 7), (1, 7), (4, 7), (4, 7)] * 6
    for (_, ids, _), (_, again, _) in zip(stage.calls[::2], stage.calls[1::2], strict=True):
        assert ids.tolist() == again.tolist()
        assert 0 <= ids.min() <= ids.max() < WORDS, "ids that the smallest vocabulary has"
    assert all(more == ({"use_cache": False} if name == "causal" else {}) for name, _, more in stage.calls)
    assert set(stage.states) == {(False, True)}
    assert (stage.models["teacher"].training, stage.models["causal"].training) == (True, False)


def test_a_gpu_is_waited_for_before_each_look_at_the_clock(monkeypatch):
    assert speed.timer is torch.utils.benchmark.timer
    stage = Stage(monkeypatch, {"one": {1: [1.0], 2: [1.0]}})
    order: list[str] = []
    monkeypatch.setattr(speed, "timer", lambda: order.append("look") or stage.now)
    measure_speed(stage.models, batch_size=2, length=7, repeats=1, warmup=0)
    assert order == ["look", "look"] * 2
