"""A training step never makes the host wait for the device.

It runs on torch's meta device, which has shapes but no values: whoever asks for a value (`.item()`, `.tolist()`,
`.cpu()`, a tensor as a truth value, indexing by a boolean mask) fails there, where a GPU would be waited for. As on a
GPU, the paths that a CPU may take by looking at values are closed.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from plain_engine import PlainEngine
from tiny import tiny_config
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, BertForPreTraining, PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch, HeadInputs, OtherTokens
from llmdistill.config import TrainConfig
from llmdistill.methods import METHODS, build_method
from llmdistill.models.heads import CLASSES
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import World
from llmdistill.step import packed
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder
from llmdistill.teachers.cache.teacher import CachedTeacher
from llmdistill.teachers.output_rows import Request
from llmdistill.teachers.several import AveragedTeachers, TeachersOfRows
from llmdistill.teachers.translated import TranslatedTeacher
from llmdistill.training.trainer import Trainer


@pytest.fixture(autouse=True)
def meta_world() -> Iterator[None]:
    """Each step runs on the meta device, which has no values that the host could wait for."""
    with World(rank=0, size=1, device=torch.device("meta")).entered():
        yield


FAMILIES = ("llama", "mistral", "gpt2", "bert")
GIVEN: dict[str, dict[str, Any]] = {
    "kd": {"ratio": 0.7, "temperature": 2.0, "divergence": "skew_reverse_kl"},
    "makd": {"matrix_layers": "all", "layer_layers": "all", "label": 0.5},
    "minilm": {"teacher_layers": "uniform", "value_mse": 1.0},
    "minilmv2": {"relation_heads": 8, "relations": ("qq", "kk", "qk")},
    "tinybert": {"soft": 1.0},
}
SETTINGS = {name: METHODS[name].settings(**given) for name, given in GIVEN.items()}
ALL = [*SETTINGS, "sft", "distilbert", "kroneckerbert"]


class SlowCopies(TorchFunctionMode):
    """Fails where something is copied to the device in a way that the host waits for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not torch.is_tensor(args[0]):
            assert not result.is_meta, "Python numbers are copied to the device: torch.full makes them there"
        if func is torch.Tensor.to and result.is_meta and args[0].device.type == "cpu":
            assert (kwargs or {}).get("non_blocking"), "a copy to the device is waited for"
        return result


def make_model(family: str) -> PreTrainedModel:
    config = tiny_config(family, hidden_size=32, **({"attn_pdrop": 0.0} if family == "gpt2" else {}))
    make = BertForPreTraining._from_config if family == "bert" else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config, attn_implementation="sdpa").train()


def make_batch(family: str) -> Batch:
    ids = torch.randint(3, 40, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :4] = IGNORE_INDEX
    targets = torch.tensor([1, IGNORE_INDEX, 0]) if family == "bert" else None
    return Batch(ids, mask, labels, targets=targets)


def make_trainer(method_name: str, family: str, **settings: Any) -> Trainer:
    teacher, student = make_model(family).eval(), make_model(family)
    objective = Objective(tokens=True, targets=CLASSES if family == "bert" else None)
    names = ALL if method_name == "all" else [method_name]
    method = build_method(names, SETTINGS, teacher.config, student.config, objective)
    if settings.get("activation_checkpointing"):
        student.gradient_checkpointing_enable({"use_reentrant": False})
    projectors = nn.ModuleDict(
        {name: nn.Linear(*widths, bias=False, device="meta") for name, widths in method.projections.items()}
    )
    learner = TappedModel(student, Recorder(student, method.student_taps, projectors))
    taught = TappedModel(teacher, Recorder(teacher, method.teacher_taps)) if method.needs_teacher else None
    given = {"loader": None, "settings": TrainConfig(**settings), "seed": 0}
    return Trainer(engine=PlainEngine(student), student=learner, teacher=taught, method=method, **given)


@pytest.mark.parametrize(("method", "family"), [("sft", "llama"), *(("all", family) for family in FAMILIES)])
def test_a_step_asks_the_device_for_nothing(method: str, family: str) -> None:
    trainer, batch = make_trainer(method, family), make_batch(family)
    with SlowCopies():
        losses, counts = trainer.train_step([batch, batch])
    assert losses.shape == (2, len(trainer.method.weights))
    assert counts.shape == (3,)


def test_nor_does_one_on_the_students_own_answers_under_checkpointing() -> None:
    trainer = make_trainer("kd", "llama", activation_checkpointing=True)
    with SlowCopies():
        trainer.train_step([replace(make_batch("llama"), labels_are="samples")])


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("llama", "varlen_attn"),
        ("mistral", "varlen_attn"),
        ("mistral", "_attend_by_sequence"),
        ("gpt2", "_attend_by_sequence"),
    ],
)
def test_nor_does_one_on_packed_rows(family: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernel for all sequences at once knows the meta device, too."""
    if path == "varlen_attn" and not packed.HAS_VARLEN:
        pytest.skip("torch has no such kernel")
    monkeypatch.setattr(packed, "has_kernel", lambda _: path == "varlen_attn")
    batch = make_batch(family)
    positions = torch.cat([torch.arange(5), torch.arange(4)]).expand(3, 9)
    rows = replace(batch, attention_mask=torch.tensor([1] * 5 + [2] * 4).expand(3, 9), position_ids=positions)
    trainer = make_trainer("makd", family)
    with SlowCopies(), mock.patch.object(packed, path, wraps=getattr(packed, path)) as called:
        trainer.train_step([rows])
    assert called.called


class SmallCache:
    """A cache of hidden states in int8, of a model with the sizes of `make_model`."""

    record: ClassVar[dict[str, Any]] = {"held": {"top_k": None}}
    scaling: ClassVar[dict[int, float]] = {}

    def head(self, device: torch.device) -> HeadInputs:
        return HeadInputs(torch.empty(0, 32, device=device), torch.empty(64, 32, device=device), None)

    def find(self, ids: list[int]) -> np.ndarray:
        return np.array(ids)

    def rows(self, name: str, places: np.ndarray) -> torch.Tensor:
        count = sum(int((make_batch("llama").labels[row, 1:] != IGNORE_INDEX).sum()) for row in places)
        return torch.ones(count) if name.endswith("scale") else torch.ones(count, 32, dtype=torch.int8)


class SmallTranslation:
    """Another tokenizer that cuts the last two labels of each row into other tokens."""

    shared = torch.arange(40), torch.arange(40)

    def __call__(self, batch: Batch) -> tuple[Batch, OtherTokens]:
        here = batch.on_cpu()
        assert not here.input_ids.is_meta, "the batch is read on the CPU"
        first = [0, *(here.labels[:, 1:] != IGNORE_INDEX).sum(1).cumsum(0).tolist()]
        rows = torch.arange(first[-1])
        spans = torch.full_like(rows, -1)
        for number, end in enumerate(first[1:]):
            spans[end - 2 : end] = number
        pairs, starts = rows.where(spans < 0, -1), rows.where((spans >= 0) & (spans != spans.roll(1)), -1)
        empty = HeadInputs(torch.empty(0), None, None)
        return replace(here, copied_from=None), OtherTokens(empty, rows, spans, pairs, spans, starts, 3, self.shared)


def teachers_of_kinds(live: TappedModel, request: Request) -> dict[str, Any]:
    """Teachers in the place of a live one."""
    cached: Any = SmallCache()
    translation: Any = SmallTranslation()
    both = {"": live, "other": live}
    return {
        "rows": TeachersOfRows(teachers=both, together=frozenset()),
        "probabilities": AveragedTeachers(teachers=both, weights=[1.0, 2.0], average="probabilities"),
        "cache": CachedTeacher(cached, request, shift=True, device=torch.device("meta")),
        "alm": TranslatedTeacher(live, translation, say=lambda _: None),
        "uld": TranslatedTeacher(live, translation, say=lambda _: None),
    }


@pytest.mark.parametrize("kind", ["rows", "probabilities", "cache", "alm", "uld"])
def test_nor_does_one_with_other_teachers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "kd", METHODS["kd"].settings(spans="uld" if kind == "uld" else "alm"))
    trainer = make_trainer("kd", "llama")
    live: Any = trainer.teacher
    trainer.teacher = teachers_of_kinds(live, Request.of(trainer.method))[kind]
    batch = replace(make_batch("llama"), sample_ids=((0,), (1,), (2,)))
    if kind == "rows":
        batch = replace(batch, teachers=("", "other", ""))
    with SlowCopies():
        trainer.train_step([batch, batch])
