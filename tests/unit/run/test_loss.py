"""The loss for somebody's own loop, against full logits and hooks."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from byte_tokenizers import TEXTS, byte_level
from sentence_encoders import encoder
from tiny import tiny_config, tiny_model
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import llmdistill
from llmdistill import DistillationLoss, UserError

VOCABULARY = 50


def make_llama(seed: int, **changes) -> PreTrainedModel:
    return tiny_model("llama", seed=seed, **{"vocab_size": VOCABULARY, "initializer_range": 0.2, **changes})


def make_bert(kind: Any, seed: int, **changes) -> Any:
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
    other = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<stop>", pad_token="<stop>")
    return other, torch.arange(last, -1, -1)


def test_methods_on_inner_tensors_are_refused_with_tokenizers(models):
    with pytest.raises(UserError, match="tokenizers are given, but method makd needs the same tokens: take kd"):
        DistillationLoss(*models, "makd", tokenizers=(byte_level(300), byte_level(280)))


def naive_outputs(model, batch):
    """Everything that MaKD compares, from hooks and eager attention."""
    kept, hooks = {}, []
    for name, module in model.named_modules():
        # Whole layers too: the last hidden state that transformers gives is after the norm.
        if found := re.fullmatch(r"model\.layers\.(\d+)(?:\.\w+\.(\w+_proj))?", name):
            key = found[2] or "layer", int(found[1])
            hooks.append(module.register_forward_hook(lambda *a, key=key: kept.__setitem__(key, a[2])))
    model.set_attn_implementation("eager")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    outputs = model(**inputs, output_attentions=True)
    model.set_attn_implementation("sdpa")
    for hook in hooks:
        hook.remove()
    return outputs, kept


def naive_makd(teacher, student, batch) -> dict[str, torch.Tensor]:
    """Each term of MaKD on two-layer models, mean over tokens or labels (MaKD eq. 12-18)."""
    with torch.no_grad():
        of_teacher, taps_t = naive_outputs(teacher, batch)
    of_student, taps_s = naive_outputs(student, batch)
    real = batch["attention_mask"].bool()
    names = {"query": "q", "key": "k", "value": "v", "ffn_up": "up", "ffn_gate": "gate", "ffn_down": "down"}
    # A rotation does not change the error of queries and keys.
    terms = {
        name: functional.mse_loss(taps_s[f"{kind}_proj", 0][real], taps_t[f"{kind}_proj", 0][real])
        for name, kind in names.items()
    }
    log_s, log_t = (
        each.attentions[1].clamp(min=1e-30).log().transpose(1, 2)[real] for each in (of_student, of_teacher)
    )
    terms["attention"] = (log_s.exp() * (log_s - log_t)).sum(-1).mean()
    terms["hidden"] = functional.mse_loss(taps_s["layer", 1][real], taps_t["layer", 1][real])
    chosen = batch["labels"][:, 1:] != -100
    p, log_q = of_teacher.logits[:, :-1][chosen].softmax(-1), of_student.logits[:, :-1][chosen].log_softmax(-1)
    terms["logits"] = -(p * log_q).sum(-1).mean()
    return terms


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class TestDistillationLoss:
    def test_makd_is_what_hooks_and_full_logits_give(self, models):
        (teacher, student), batch = models, make_batch()
        expected = naive_makd(teacher, student, batch)
        sum(expected.values()).backward()
        wanted = gradients(student)
        student.zero_grad()
        loss = DistillationLoss(teacher, student, scale="plain")
        result = loss(batch)
        assert list(result.terms) == list(expected)
        for name, term in expected.items():
            assert float(result.terms[name]) == pytest.approx(float(term.detach()), rel=1e-4), name
        assert float(result.loss.detach()) == pytest.approx(sum(float(term.detach()) for term in expected.values()))
        result.backward()
        found = gradients(student)
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5) for name in found)
        assert not gradients(teacher)

    def test_settings_of_the_method_and_methods_beside_it(self, models):
        (teacher, student), batch = models, make_batch()
        loss = DistillationLoss(
            teacher, student, "kd", also=["minilm"], temperature=2.0, ratio=0.25, settings={"minilm.attention": 3.0}
        )
        result = loss(batch)
        with torch.no_grad():
            chosen = batch["labels"][:, 1:] != -100
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            log_p, log_q = (
                (model(**inputs).logits[:, :-1][chosen] / 2.0).log_softmax(-1) for model in (teacher, student)
            )
            divergence = 4 * (log_p.exp() * (log_p - log_q)).sum(-1).mean()
            label = student(**batch).loss
        terms = {name.rsplit(".", 1)[-1]: float(term) for name, term in result.terms.items()}
        assert terms["forward_kl"] == pytest.approx(float(divergence), rel=1e-4)
        assert terms["label"] == pytest.approx(float(label), rel=1e-4)
        weighted = {name: loss.method.weights[name] * float(term) for name, term in result.terms.items()}
        assert float(result.loss.detach()) == pytest.approx(sum(weighted.values()), rel=1e-5)
        assert sorted(loss.method.weights.values()) == [0.25, 0.75, 1.0, 3.0]

    def test_parts_of_a_step_add_up_to_the_whole(self, models):
        loss = DistillationLoss(*models)
        parts = [make_batch(1, rows=2), make_batch(2, rows=4)]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        expected = loss(whole)
        counts = loss.counts(parts)
        found = [loss(part, num_items_in_batch=counts) for part in parts]
        assert float(sum(each.loss.detach() for each in found)) == pytest.approx(
            float(expected.loss.detach()), rel=1e-5
        )
        for name, term in expected.terms.items():
            assert float(sum(each.terms[name] for each in found)) == pytest.approx(float(term), rel=1e-5)

    def test_the_number_of_labels_alone(self, models):
        loss = DistillationLoss(*models, "kd")
        batch = make_batch()
        labels = int((batch["labels"][:, 1:] != -100).sum())
        whole, third = loss(batch), loss(batch, num_items_in_batch=3 * labels)
        assert float(third.loss.detach()) == pytest.approx(float(whole.loss.detach()) / 3, rel=1e-5)
        makd = DistillationLoss(make_llama(0), make_llama(1))
        hidden = makd(batch).terms["hidden"], makd(batch, num_items_in_batch=3 * labels).terms["hidden"]
        assert float(hidden[1]) == pytest.approx(float(hidden[0]) / 3, rel=1e-5)

    def test_several_sequences_in_a_row(self, models):
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
        expected = sum(loss(each, num_items_in_batch=counts).loss.detach() for each in apart)
        assert float(loss(flat).loss.detach()) == pytest.approx(float(expected), rel=1e-5)

    def test_learned_matrices_are_trained_and_not_saved(self, tmp_path):
        teacher, student = make_llama(0), make_llama(1, hidden_size=8)
        loss = DistillationLoss(teacher, student, "tinybert")
        loss(make_batch()).backward()
        own = [parameter for name, parameter in student.named_parameters() if "projector" in name]
        assert own
        assert all(parameter.grad is not None for parameter in own)
        student.save_pretrained(tmp_path)
        loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["unexpected_keys"]
        assert not info["missing_keys"]
        ids = make_batch()["input_ids"]
        assert torch.equal(loaded(ids).logits, student(ids).logits)
        loss.remove()
        assert not [name for name, _ in student.named_parameters() if "projector" in name]

    def test_outside_of_it_the_models_are_as_before(self, models):
        teacher, student = models
        ids = make_batch()["input_ids"]
        before = student(ids).logits, teacher(ids).logits
        loss = DistillationLoss(teacher, student)
        assert torch.equal(student(ids).logits, before[0])
        assert student.generate(ids[:1], max_new_tokens=3, do_sample=False).shape == (1, 13)
        with pytest.raises(UserError, match="tapped already"):
            DistillationLoss(teacher, student)
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

    def test_an_encoder_with_a_classifier(self):
        teacher, student = (make_bert(BertForSequenceClassification, seed, num_labels=3) for seed in (0, 1))
        batch = {**make_batch(), "labels": torch.tensor([0, 2, 1])}
        result = DistillationLoss(teacher, student, "kd", ratio=0.5)(batch)
        with torch.no_grad():
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            log_p, log_q = (model(**inputs).logits.log_softmax(-1) for model in (teacher, student))
            expected = 0.5 * (log_p.exp() * (log_p - log_q)).sum(-1).mean() + 0.5 * student(**batch).loss
        assert float(result.loss.detach()) == pytest.approx(float(expected), rel=1e-4)

    def test_an_encoder_with_a_head_for_spans(self):
        teacher, student = (make_bert(BertForQuestionAnswering, seed) for seed in (0, 1))
        ids = make_batch()["input_ids"]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        spans = {"start_positions": torch.tensor([0, 2, 1]), "end_positions": torch.tensor([0, 3, 3])}
        result = DistillationLoss(teacher, student, "kd", ratio=0.25, temperature=2.0)({**inputs, **spans})
        with torch.no_grad():
            theirs, mine = teacher(**inputs), student(**inputs, **spans)
            kl = 0.0
            for name in ("start_logits", "end_logits"):
                log_p, log_q = ((each[name] / 2).log_softmax(-1) for each in (theirs, mine))
                kl += 4 * (log_p.exp() * (log_p - log_q)).sum(-1).mean() / 2
            expected = 0.25 * kl + 0.75 * mine.loss
        assert float(result.loss.detach()) == pytest.approx(float(expected), rel=1e-4)
        result.loss.backward()
        assert student.qa_outputs.weight.grad is not None

    def test_bert_before_any_task(self):
        model = make_bert(BertForPreTraining, 0)
        batch = {**make_batch(), "next_sentence_label": torch.tensor([0, 1, 0])}
        result = DistillationLoss(model, model, "sft")(batch)
        with torch.no_grad():
            assert float(result.loss.detach()) == pytest.approx(float(model(**batch).loss), rel=1e-4)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"method": "mkad"}, "mkad"),
            ({"temprature": 2.0}, "makd.temprature.*makd.temperature"),
            ({"settings": {"kd.ratio": 1.0}}, "kd.ratio.*makd"),
            ({"student": make_llama(0, vocab_size=60)}, "vocabulary"),
        ],
    )
    def test_what_does_not_fit(self, models, arguments, said):
        with pytest.raises(UserError, match=said):
            DistillationLoss(**{"teacher": models[0], "student": models[1], **arguments})
        with pytest.raises(UserError, match="labels"):
            DistillationLoss(*models, "kd")({"input_ids": make_batch()["input_ids"]})


def test_embeddings_of_sentences_are_those_of_a_loop(tmp_path):
    encoder(tmp_path)
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    teacher = BertModel.from_pretrained(tmp_path).eval()
    student = copy.deepcopy(teacher).eval()
    with torch.no_grad():
        student.encoder.layer[1].output.dense.weight *= 0.5
    batch = {"input_ids": make_batch(rows=6)["input_ids"] % 10, "attention_mask": make_batch(rows=6)["attention_mask"]}
    mask = batch["attention_mask"]
    places = {"labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    for given, take in (
        ({}, lambda hidden, mask: (hidden * mask).sum(1) / mask.sum(1)),
        ({"pooling": "cls"}, lambda hidden, _mask: hidden[:, 0]),
    ):
        loss = DistillationLoss(teacher, student, method="embedding", mse=0.5, margin=2.0, **given)
        result = loss({**batch, **places})
        theirs, ours = (
            take(model(**batch).last_hidden_state, mask[:, :, None].float()) for model in (teacher, student)
        )
        cosine = (1 - functional.cosine_similarity(ours, theirs)).mean()
        mse = (ours - theirs).square().mean()
        margins = [each[0::3] * (each[1::3] - each[2::3]) for each in (ours, theirs)]
        margin = (margins[0].sum(1) - margins[1].sum(1)).square().mean()
        torch.testing.assert_close(result.loss, cosine + 0.5 * mse + 2 * margin)
        gradients = torch.autograd.grad(result.loss, student.encoder.layer[1].output.dense.weight)
        expected = torch.autograd.grad(cosine + 0.5 * mse + 2 * margin, student.encoder.layer[1].output.dense.weight)
        torch.testing.assert_close(gradients, expected)
        assert loss(batch).terms["margin"] == 0  # without triples
        loss.remove()
    with pytest.raises(UserError, match="pooling: 'middle' does not fit"):
        DistillationLoss(teacher, student, method="embedding", pooling="middle")


def test_embeddings_of_another_width_are_mapped_by_a_matrix_but_their_margins_are_not(tmp_path):
    teacher = encoder(tmp_path / "teacher")
    sizes = {**teacher.config.to_dict(), "hidden_size": 8}
    student = BertModel(BertConfig(**sizes)).eval()
    batch = {"input_ids": make_batch(rows=6)["input_ids"] % 10, "attention_mask": make_batch(rows=6)["attention_mask"]}
    given = {"method": "embedding", "pooling": "cls", "mse": 0.5, "margin": 2.0}
    with pytest.raises(UserError, match="the main job"):
        DistillationLoss(teacher, student, projection="keep", **given)
    loss = DistillationLoss(teacher, student, **given)
    matrix = student.distillation_projectors["sentence"].weight
    assert torch.allclose(matrix.T @ matrix, torch.eye(8), atol=1e-6)
    result = loss({**batch, "labels": torch.tensor([0, 1, 2, 0, 1, 2])})
    theirs, ours = (model(**batch).last_hidden_state[:, 0] for model in (teacher, student))
    mapped = ours @ matrix.T
    expected = (1 - functional.cosine_similarity(mapped, theirs)).mean() + 0.5 * (mapped - theirs).square().mean()
    margins = [(each[0::3] * (each[1::3] - each[2::3])).sum(1) for each in (ours, theirs)]
    expected = expected + 2 * (margins[0] - margins[1]).square().mean()
    torch.testing.assert_close(result.loss, expected)
    for weight in (matrix, student.encoder.layer[1].output.dense.weight):
        found, wanted = (torch.autograd.grad(each, weight, retain_graph=True)[0] for each in (result.loss, expected))
        torch.testing.assert_close(found, wanted)
    loss.remove()
    student.save_pretrained(tmp_path / "student")
    _, info = BertModel.from_pretrained(tmp_path / "student", output_loading_info=True)
    assert not info["unexpected_keys"]
