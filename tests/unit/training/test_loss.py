"""The loss for somebody's own loop, against full logits and hooks; and transformers' Trainer with it."""

import copy
import json
from functools import partial
from operator import itemgetter

import peft
import pytest
import torch
from byte_tokenizers import TEXTS, byte_level
from hostile import refuses
from sentence_encoders import encoder
from tiny import save_decoder, tiny_config, tiny_model
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    TrainingArguments,
)

import llmdistill
from llmdistill import DistillationLoss, DistillationTrainer, UserError
from llmdistill.training import assemble
from llmdistill.training.plan import make_plans

VOCABULARY = 50


def make_llama(seed: int, **changes):
    return tiny_model("llama", seed=seed, **{"vocab_size": VOCABULARY, "initializer_range": 0.2, **changes})


def make_bert(kind, seed: int, **changes):
    torch.manual_seed(seed)
    return kind(tiny_config("bert", vocab_size=VOCABULARY, **changes)).eval()


@pytest.fixture
def models():
    teacher = make_llama(0)
    return teacher, llmdistill.compress(teacher, rank=8)


def make_batch(seed: int = 0, rows: int = 3, length: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : 2 + seed % 4] = -100  # the prompt
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_the_same_tokens_with_other_numbers_change_nothing():
    """The teacher's tokenizer has the student's tokens in another order, and so have its embedding and its head."""
    ours = byte_level(300)
    theirs, order = reordered(ours)
    teacher, student = make_llama(0, vocab_size=300), make_llama(1, vocab_size=300)
    other = copy.deepcopy(teacher)
    with torch.no_grad():
        for layer in (other.get_input_embeddings(), other.get_output_embeddings()):
            layer.weight[order] = layer.weight.clone()
    ids = torch.tensor([ours.encode(TEXTS[0])[:12], ours.encode(TEXTS[1])[:12]])
    batch = {"input_ids": ids, "labels": ids.clone()}
    results = []
    for told, tokenizers in ((teacher, None), (other, (ours, theirs))):
        loss = DistillationLoss(told, student, "kd", ratio=0.7, tokenizers=tokenizers)
        result = loss(batch)
        result.backward()
        results.append([result.loss.detach(), *(each.grad.clone() for each in student.parameters())])
        student.zero_grad()
        loss.remove()
    for one, with_tokenizers in zip(*results, strict=True):
        torch.testing.assert_close(with_tokenizers, one, rtol=1e-5, atol=1e-7)


def reordered(tokenizer):
    """The tokenizer with its numbers reversed, and the new number of each token."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    last = len(tokenizer) - 1
    state["model"]["vocab"] = {token: last - number for token, number in state["model"]["vocab"].items()}
    for each in state["added_tokens"]:
        each["id"] = last - each["id"]
    backend = Tokenizer.from_str(json.dumps(state))
    other = type(tokenizer)(tokenizer_object=backend, eos_token="<stop>", pad_token="<stop>")
    return other, torch.arange(last, -1, -1)


class TestDistillationLoss:
    def test_settings_of_the_method_and_methods_beside_it(self, models):
        given = {"also": ["minilm"], "temperature": 2.0, "ratio": 0.25, "settings": {"minilm.attention": 3.0}}
        loss = DistillationLoss(*models, "kd", **given)
        result, weights = loss(make_batch()), loss.method.weights
        weighted = [weights[name] * float(term) for name, term in result.terms.items()]
        assert float(result.loss.detach()) == pytest.approx(sum(weighted), rel=1e-5)
        assert sorted(weights.values()) == [0.25, 0.75, 1.0, 3.0]

    def test_the_number_of_labels_alone(self, models):
        loss = DistillationLoss(*models, "kd")
        batch = make_batch()
        labels = int((batch["labels"][:, 1:] != -100).sum())
        whole, third = loss(batch), loss(batch, num_items_in_batch=3 * labels)
        assert float(third.loss.detach()) == pytest.approx(float(whole.loss.detach()) / 3, rel=1e-5)
        makd = DistillationLoss(make_llama(0), make_llama(1))
        hidden = makd(batch).terms["hidden"], makd(batch, num_items_in_batch=3 * labels).terms["hidden"]
        assert float(hidden[1]) == pytest.approx(float(hidden[0]) / 3, rel=1e-5)

    def test_sequences_in_a_row_are_the_sum_of_the_parts_of_a_step(self, models):
        """As DataCollatorWithFlattening gives them: no mask, positions from 0 in each."""
        loss = DistillationLoss(*models)
        rows = [torch.arange(3, 10), torch.arange(20, 32)]
        flat = {
            "input_ids": torch.cat(rows)[None],
            "labels": torch.cat([torch.cat([torch.tensor([-100]), row[1:]]) for row in rows])[None],
            "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        }
        apart = [{"input_ids": row[None], "labels": row[None]} for row in rows]
        counts = loss.counts(apart)
        whole, parts = loss(flat), [loss(each, num_items_in_batch=counts) for each in apart]
        assert float(whole.loss.detach()) == pytest.approx(float(sum(each.loss.detach() for each in parts)), rel=1e-5)
        for name, term in whole.terms.items():
            assert float(term) == pytest.approx(float(sum(each.terms[name] for each in parts)), rel=1e-5), name

    def test_outside_of_it_the_models_are_as_before(self, models):
        teacher, student = models
        ids = make_batch()["input_ids"]
        before = student(ids).logits, teacher(ids).logits
        loss = DistillationLoss(teacher, student)
        assert torch.equal(student(ids).logits, before[0])
        assert student.generate(ids[:1], max_new_tokens=3, do_sample=False).shape == (1, 13)
        refuses("tapped already", DistillationLoss, teacher, student)
        loss.remove()
        assert student.config._attn_implementation == teacher.config._attn_implementation == "sdpa"
        assert "forward" not in vars(student.lm_head)
        assert torch.equal(student(ids).logits, before[0])
        again = DistillationLoss(teacher, student, "kd")
        assert torch.isfinite(again(make_batch()).loss)

    def test_autocast_rounds_no_sum(self, models):
        loss = DistillationLoss(*models)
        expected = loss(make_batch())
        with torch.autocast("cpu", torch.bfloat16):
            result = loss(make_batch())
        assert {term.dtype for term in result.terms.values()} == {torch.float32}
        for name, term in expected.terms.items():
            assert float(result.terms[name]) == pytest.approx(float(term), rel=0.05), name
        result.backward()

    @pytest.mark.parametrize(
        ("kind", "labels"),
        [
            (BertForSequenceClassification, {"labels": [0, 2, 1]}),
            (BertForQuestionAnswering, {"start_positions": [0, 2, 1], "end_positions": [0, 3, 3]}),
        ],
    )
    def test_an_encoder_with_a_head_for_sequences_or_spans(self, kind, labels):
        outputs = ["logits"] if "labels" in labels else ["start_logits", "end_logits"]
        teacher, student = (make_bert(kind, seed, num_labels=3 if "labels" in labels else 2) for seed in (0, 1))
        ids = make_batch()["input_ids"]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        answers = {name: torch.tensor(each) for name, each in labels.items()}
        result = DistillationLoss(teacher, student, "kd", ratio=0.25, temperature=2.0)({**inputs, **answers})
        with torch.no_grad():
            theirs, mine = teacher(**inputs), student(**inputs, **answers)
            expected = 0.75 * mine.loss
            for name in outputs:
                log_p, log_q = ((each[name] / 2).log_softmax(-1) for each in (theirs, mine))
                expected += 0.25 * 4 * (log_p.exp() * (log_p - log_q)).sum(-1).mean() / len(outputs)
        assert float(result.loss.detach()) == pytest.approx(float(expected), rel=1e-4)
        result.loss.backward()
        assert student.bert.embeddings.word_embeddings.weight.grad is not None

    def test_bert_before_any_task(self):
        model = make_bert(BertForPreTraining, 0)
        batch = {**make_batch(), "next_sentence_label": torch.tensor([0, 1, 0])}
        result = DistillationLoss(model, model, "sft")(batch)
        with torch.no_grad():
            assert float(result.loss.detach()) == pytest.approx(float(model(**batch).loss), rel=1e-4)

    def test_what_does_not_fit(self, models):
        for arguments, said in (
            ({"method": "mkad"}, "mkad"),
            ({"temprature": 2.0}, "makd.temprature.*makd.temperature"),
            ({"settings": {"kd.ratio": 1.0}}, "kd.ratio.*makd"),
            ({"student": make_llama(0, vocab_size=60)}, "vocabulary"),
            ({"tokenizers": (byte_level(300), byte_level(280))}, "method makd needs the same tokens: take kd"),
        ):
            with pytest.raises(UserError, match=said):
                DistillationLoss(**{"teacher": models[0], "student": models[1], **arguments})
        refuses("labels", DistillationLoss(*models, "kd"), {"input_ids": make_batch()["input_ids"]})


def test_embeddings_of_another_width_are_mapped_by_a_matrix_but_their_margins_are_not(tmp_path):
    """The matrix is trained with the student, and not saved with it."""
    encoder(tmp_path / "teacher")
    (tmp_path / "teacher/1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    teacher = BertModel.from_pretrained(tmp_path / "teacher").eval()
    student = BertModel(BertConfig(**{**teacher.config.to_dict(), "hidden_size": 8})).eval()
    batch = make_batch(rows=6)
    inputs = {"input_ids": batch["input_ids"] % 10, "attention_mask": batch["attention_mask"]}
    triples, mask = {"labels": torch.tensor([0, 1, 2, 0, 1, 2])}, batch["attention_mask"][:, :, None].float()
    build = partial(DistillationLoss, teacher, student, method="embedding", mse=0.5, margin=2.0)
    for given, pooled in (
        ({}, lambda hidden: (hidden * mask).sum(1) / mask.sum(1)),
        ({"pooling": "cls"}, lambda hidden: hidden[:, 0]),
    ):
        loss = build(**given)
        matrix = student.distillation_projectors["sentence"].weight
        assert torch.allclose(matrix.T @ matrix, torch.eye(8), atol=1e-6)
        result = loss({**inputs, **triples})
        theirs, ours = (pooled(model(**inputs).last_hidden_state) for model in (teacher, student))
        mapped = ours @ matrix.T
        expected = (1 - functional.cosine_similarity(mapped, theirs)).mean() + 0.5 * (mapped - theirs).square().mean()
        margins = [(each[0::3] * (each[1::3] - each[2::3])).sum(1) for each in (ours, theirs)]
        expected = expected + 2 * (margins[0] - margins[1]).square().mean()
        torch.testing.assert_close(result.loss, expected)
        weights = (matrix, student.encoder.layer[1].output.dense.weight)
        found, wanted = (torch.autograd.grad(each, weights) for each in (result.loss, expected))
        torch.testing.assert_close(found, wanted)
        assert loss(inputs).terms["margin"] == 0  # without triples
        student.save_pretrained(tmp_path / "student")
        _, info = BertModel.from_pretrained(tmp_path / "student", output_loading_info=True)
        assert not info["unexpected_keys"]
        assert not info["missing_keys"]
        loss.remove()
        assert not [name for name, _ in student.named_parameters() if "projector" in name]
    refuses("pooling: 'middle' does not fit", build, pooling="middle")
    refuses("the main job", build, projection="keep")


STEPS, MICRO, ACCUMULATION = 4, 4, 2
first = itemgetter(0)
ROWS = [
    {"prompt": f"Number {i}" + " and" * (i % 5), "completion": f"is {i % 7}" + " more" * (i % 3)} for i in range(32)
]


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """A run of the main job, the models it began with, and its batches by step, as a collator would give them."""
    folder = tmp_path_factory.mktemp("main_job")
    teacher = LlamaForCausalLM.from_pretrained(save_decoder(folder / "teacher", num_hidden_layers=2))
    student = llmdistill.compress(teacher, rank=8)
    settings = {"steps": STEPS, "learning_rate": 1e-3, "schedule": "constant", "log_every": 1}
    settings |= {"global_batch_size": MICRO * ACCUMULATION, "micro_batch_size": MICRO}
    result = llmdistill.distill(teacher, student, ROWS, output_dir=folder / "run", **settings)
    (plan,) = make_plans(result.config)
    loader = plan.task.read(plan.models).prepare().loader(assemble.share_of(plan))
    batches = [
        {key: getattr(batch, key) for key in ("input_ids", "attention_mask", "labels")}
        for step in range(STEPS)
        for batch in loader.micro_batches(step)
    ]
    return teacher, student, batches, result


def arguments(folder, **changes) -> TrainingArguments:
    values = {"max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    values |= {"max_grad_norm": 1.0, "gradient_accumulation_steps": ACCUMULATION, "save_strategy": "no"}
    values |= {"per_device_train_batch_size": 1}  # of whole micro batches, see the collator
    values |= {"logging_steps": 1, "logging_nan_inf_filter": False, "report_to": [], "disable_tqdm": True}
    values |= {"use_cpu": True, "remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    return TrainingArguments(output_dir=str(folder), **{**values, **changes})


def test_a_trainer_does_what_the_main_job_does(main_job, tmp_path):
    teacher, student, batches, result = main_job
    student = copy.deepcopy(student)
    trainer = DistillationTrainer(
        student, copy.deepcopy(teacher), arguments(tmp_path), train_dataset=batches, data_collator=first
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for name in ("loss", *trainer.distillation.method.weights):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in result.history], rel=1e-4)
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in result.history], rel=1e-3)
    trained = result.student.state_dict()
    for name, tensor in student.state_dict().items():
        assert torch.allclose(tensor, trained[name], atol=2e-5), name


def test_evaluation_and_a_checkpoint(main_job, tmp_path):
    teacher, student, batches, _ = main_job
    student = copy.deepcopy(student)
    given = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, per_device_eval_batch_size=1)
    kd = {"method": "kd", "method_settings": {"temperature": 2.0}}
    data = {"train_dataset": batches, "eval_dataset": batches[:1], "data_collator": first}
    trainer = DistillationTrainer(student, copy.deepcopy(teacher), given, **kd, **data)
    trainer.train()
    figures = trainer.evaluate()
    student.eval()
    expected = trainer.distillation(batches[0])
    assert figures["eval_loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-4)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(loaded(batches[0]["input_ids"]).logits, student(batches[0]["input_ids"]).logits)
    assert "llmdistill_taps" not in json.dumps(loaded.config.to_dict())


def test_the_terms_of_a_resumed_trainer_are_means_of_its_own_steps(main_job, tmp_path):
    teacher, student, batches, _ = main_job
    logged = []
    for resume, steps in ((False, 2), (True, 4)):
        given = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2, logging_steps=2)
        data = {"train_dataset": batches, "data_collator": first}
        trainer = DistillationTrainer(copy.deepcopy(student), copy.deepcopy(teacher), given, method="kd", **data)
        trainer.train(resume_from_checkpoint=resume)
        logged.append([row for row in trainer.state.log_history if "loss" in row][-1])
    for row in logged:
        weights = trainer.distillation.method.weights
        assert row["loss"] == pytest.approx(sum(weight * row[name] for name, weight in weights.items()), rel=1e-3)


def test_a_batch_is_given_as_it_is_and_a_model_has_one_loss():
    teacher, student = tiny_model("llama"), tiny_model("llama", seed=1)
    loss = DistillationLoss(teacher, student, "kd")
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[3, 4, 5]])}
    refuses("the loss was called with the keyword input_ids: give the batch as it is", lambda: loss(**batch))
    refuses("with a list without input_ids", loss, [1])
    refuses(
        "the teacher is tapped already: call remove() of the other DistillationLoss", DistillationLoss, teacher, student
    )
    loss.remove()
    DistillationLoss(teacher, student, "kd").remove()
    made = partial(DistillationLoss, tau=1)
    refuses("kd.tau: there is no such setting; here it is kd.temperature", made, teacher, student, "kd")


def plain_terms(teacher, student, batch):
    """kd's terms of whole logits: KL(teacher || student) and cross-entropy, means over the labels."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        theirs = teacher(**inputs).logits.log_softmax(-1)[:, :-1]
    ours, labels = student(**inputs).logits.log_softmax(-1)[:, :-1], batch["labels"][:, 1:]
    kl = functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)[labels != -100].mean()
    return kl, functional.nll_loss(ours.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("wrap", ["adapters", "compiled adapters"])
def test_models_with_adapters_and_compiled_ones_are_what_they_compute(wrap):
    """A student and a teacher of peft, whose LM heads have adapters too, against plain formulas through peft itself."""
    models = [make_llama(seed) for seed in (0, 1)]
    if "adapters" in wrap:
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
        models = [peft.get_peft_model(model, settings) for model in models]
    teacher, student = models
    batch = make_batch()
    expected = plain_terms(teacher, student, batch)
    (sum(expected) / 2).backward()
    gradients = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    student.zero_grad(set_to_none=True)
    compiled = [torch.compile(model, backend="eager") for model in models] if "compiled" in wrap else models
    result = DistillationLoss(*compiled, "kd", ratio=0.5)(batch)
    result.backward()
    torch.testing.assert_close([*result.terms.values()], [term.detach() for term in expected], rtol=1e-5, atol=1e-6)
    learned = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    torch.testing.assert_close(learned, gradients, rtol=1e-4, atol=1e-6)
    assert all("lora" in name for name in learned) == ("adapters" in wrap)


@pytest.mark.parametrize("method", ["kd", "makd", "minilm"])
def test_a_student_can_be_copied_between_steps(method):
    teacher, student = make_llama(0), make_llama(1)
    loss, batch = DistillationLoss(teacher, student, method), make_batch()
    loss(batch).loss.backward()
    copied = copy.deepcopy(student)  # as the average of weights does
    logits = [model(batch["input_ids"]).logits for model in (student, copied)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    copied(**batch).loss.backward()
    assert loss(batch).loss.isfinite()
    refuses("the student is a copy of a tapped model", DistillationLoss, make_llama(0), copied)
    loss.remove()
    DistillationLoss(make_llama(0), copy.deepcopy(student), method).remove()


def test_batches_of_lists_arrays_and_small_integers_are_those_of_tensors():
    loss, batch = DistillationLoss(make_llama(0), make_llama(1), "kd"), make_batch()
    expected = loss(batch).loss.item()
    for convert in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.int, torch.Tensor.short):
        assert loss({key: convert(value) for key, value in batch.items()}).loss.item() == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": torch.full((3, 9), 5)}, r"labels has the shape \(3, 9\), and input_ids \(3, 10\)"),
        ({"attention_mask": torch.ones(3, 1, 10, 10)}, r"attention_mask has the shape \(3, 1, 10, 10\)"),
        ({"labels": torch.full((3, 10), -1)}, "labels hold -1: the student has 0 to 49, or -100 where"),
        ({"labels": torch.full((3, 10), 50)}, "labels hold 50: the student has 0 to 49, or -100 where"),
        ({"input_ids": torch.full((3, 10), 50)}, "input_ids hold 50: the student has 0 to 49"),
        ({"input_ids": torch.ones(10, dtype=torch.long)}, r"input_ids have the shape \(10,\): give rows of tokens"),
        ({"input_ids": torch.ones(0, 10, dtype=torch.long)}, r"input_ids have the shape \(0, 10\)"),
        ({"labels": [[1, 2], [3]]}, r"labels of the batch is a list that is no tensor"),
    ],
)
def test_a_batch_that_is_none_is_refused_in_one_sentence(changes, said):
    loss = DistillationLoss(make_llama(0), make_llama(1), "kd")
    with pytest.raises(UserError, match=said):
        loss({**make_batch(), **changes})


def test_models_that_do_not_fit_a_loss_are_refused_in_one_sentence():
    llama, classifier = make_llama(1), partial(make_bert, BertForSequenceClassification)
    prompts = peft.get_peft_model(make_llama(2), peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    for teacher, student, said in (
        ("gpt2", llama, "the teacher is a str: give a transformers PreTrainedModel"),
        (llama, None, "the student is a NoneType"),
        (make_llama(0), torch.nn.DataParallel(llama), "the student is a DataParallel"),
        (llama, llama, "teacher and student are one model"),
        (llama, prompts, "the student's adapter adds tokens to the input"),
        (make_llama(0), llama.model, "the student is a LlamaModel, which has no language-model head"),
        (classifier(0, num_labels=2), classifier(1, num_labels=3), "tell different numbers of classes apart"),
        (classifier(0), classifier(1, problem_type="multi_label_classification"), "but a sequence has one class here"),
    ):
        refuses(said, DistillationLoss, teacher, student, "kd")
    refuses("vocabulary is 51, but", DistillationLoss, make_llama(0), make_llama(1), "kd", vocabulary=51)
    smoothed = TrainingArguments(label_smoothing_factor=0.1)
    refuses("label_smoothing_factor is 0.1", DistillationTrainer, make_llama(0), make_llama(1), smoothed, method="kd")
    learned = DistillationLoss(llama, llama, "sft")(make_batch())  # which reads no teacher
    assert learned.terms["label"] > 0
    short = (
        tiny_model("gpt2", seed=0, vocab_size=VOCABULARY, n_positions=8),
        tiny_model("gpt2", seed=1, vocab_size=VOCABULARY, n_positions=8),
    )
    refuses("has rows of 10 tokens, but the teacher has positions for 8", DistillationLoss(*short, "kd"), make_batch())
    frozen = make_llama(1).train().requires_grad_(False)
    refuses("no parameter of the student is learned", DistillationLoss(make_llama(0), frozen, "kd"), make_batch())
    two = classifier(0, num_labels=3), classifier(1, num_labels=3)
    loss, batch = DistillationLoss(*two, "kd"), make_batch()
    refuses("classes hold 3: the student has 0 to 2", loss, {**batch, "labels": torch.tensor([1, 2, 3])})
    refuses("give one class a sequence", loss, {**batch, "labels": torch.eye(3)})
    columns = loss({**batch, "labels": torch.tensor([[0], [1], [2]])}).loss
    assert columns == loss({**batch, "labels": torch.tensor([0, 1, 2])}).loss
