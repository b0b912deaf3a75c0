"""Pairs of segments and several languages, as a run reads them."""

import re
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, PreTrainedConfig, RobertaConfig
from word_models import save_tokenizer

import llmdistill
from llmdistill.config import DataConfig, GenerationConfig, RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.data.sampler import Share
from llmdistill.methods import METHODS
from llmdistill.run.plan import make_plan
from llmdistill.runtime.distributed import World
from llmdistill.tasks.text import Text
from llmdistill.tasks.windows import TextTests

TOKENS = [f"w{number}" for number in range(20)]
SIZES = {"vocab_size": 25, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16}
BERT, ROBERTA = BertConfig(**SIZES), RobertaConfig(**SIZES, type_vocab_size=1)


@pytest.fixture
def data_of(tmp_path):
    """Reads the text of a run whose teacher has this config; further arguments are settings of the run."""

    def read(config: PreTrainedConfig, architecture: str, *arguments: str) -> Text:
        folder, text = tmp_path / "teacher", tmp_path / "text.txt"
        config.architectures = [architecture]
        config.save_pretrained(folder)
        names = ["input_ids", "token_type_ids", "attention_mask"]
        save_tokenizer(folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOKENS], model_input_names=names)
        text.write_text("\n\n".join(" ".join((TOKENS * 2)[n % 10 :][:25]) for n in range(30)), encoding="utf-8")
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            f"teacher: {{model: {folder}}}\nstudent: {{shape: 1x8x4}}\nminilmv2: {{relation_heads: 4}}\n"
            f"data: {{kind: text, train: {text}, max_length: 24, cache_dir: {tmp_path / 'cache'}}}\n",
            encoding="utf-8",
        )
        plan = make_plan(parse_run(["--recipe", str(recipe), *arguments], METHODS)[0])
        return plan.task.read(plan.models).prepared(World.alone())

    return read


def first_batch(data: Text) -> Any:
    return data.loader(Share(seed=0, global_batch_size=8, micro_batch_size=8)).micro_batches(0)[0]


def test_the_embedding_of_the_second_segment_learns(data_of):
    batch = first_batch(data_of(BertConfig(**SIZES), "BertForPreTraining", "--method", "minilm"))
    assert batch.targets is None, "next sentences are not learned"
    torch.manual_seed(0)
    smaller = BertConfig(**{**SIZES, "hidden_size": 8, "num_hidden_layers": 1})
    teacher, student = (BertForPreTraining._from_config(each, attn_implementation="sdpa") for each in (BERT, smaller))
    loss = llmdistill.DistillationLoss(teacher, student, method="minilm")
    names = ("input_ids", "attention_mask", "labels", "token_type_ids")
    loss({name: getattr(batch, name) for name in names}).backward()
    gradient = student.bert.embeddings.token_type_embeddings.weight.grad
    assert float(gradient[1].abs().max()) > 1e-3 * float(gradient[0].abs().max()) > 0


@pytest.mark.parametrize(
    ("config", "architecture", "arguments", "pairs", "next_sentence"),
    [
        (BERT, "BertForPreTraining", ("--method", "minilm"), True, False),
        (BERT, "BertForPreTraining", ("--method", "kd"), True, True),
        (BERT, "BertForMaskedLM", ("--method", "kd"), True, False),
        (BERT, "BertForPreTraining", ("--method", "kd", "--data.text.pairs", "false"), False, False),
        (BERT, "BertForPreTraining", ("--method", "kd", "--data.text.next_sentence", "false"), True, False),
        (ROBERTA, "RobertaForMaskedLM", ("--method", "minilm"), False, False),
        (ROBERTA, "RobertaForMaskedLM", ("--method", "minilm", "--data.text.pairs", "true"), True, False),
    ],
)
def test_who_reads_pairs(data_of, config, architecture, arguments, pairs, next_sentence):
    data = data_of(config, architecture, *arguments)
    assert (data.pairs, data.next_sentence) == (pairs, next_sentence)
    batch = first_batch(data)
    assert bool((batch.token_type_ids == 1).any()) == pairs
    assert (batch.targets is not None) == next_sentence


def test_languages_are_sampled_by_a_power_of_their_sizes(data_of, tmp_path):
    folder = tmp_path / "languages"
    (folder / "small").mkdir(parents=True)
    for name, count in (("large.txt", 90), ("small/first.txt", 5), ("small/second.txt", 5)):
        (folder / name).write_text("\n\n".join(" ".join(TOKENS) for _ in range(count)), encoding="utf-8")
    settings = ("--method", "minilm", "--data.train", str(folder), "--data.text.pairs", "false")

    plain = data_of(BertConfig(**SIZES), "BertForPreTraining", *settings)
    mixed = data_of(BertConfig(**SIZES), "BertForPreTraining", *settings, "--data.text.sampling_exponent", "0.3")

    shares = "{} (.*)% of the text and (.*)% of the batches"
    pattern = f"2 parts: {shares.format('large')}, {shares.format('small')}"
    large, of_large, small, of_small = map(float, re.fullmatch(pattern, mixed.report).groups())
    assert large / small == pytest.approx(9, rel=0.1)  # a rest makes a sequence too
    assert of_large / of_small == pytest.approx((large / small) ** 0.3, rel=0.03)
    assert abs(mixed.num_steps(1, 8) - plain.num_steps(1, 8)) <= 1
    assert first_batch(mixed).input_ids.shape == first_batch(plain).input_ids.shape


def test_a_text_shows_its_validation_loss_before_and_after():
    no_texts = TextTests(texts={}, settings=GenerationConfig(), models=None)
    text = Text(RunConfig(ds_config="", data=DataConfig(kind="text", train="a.txt"))).having(texts=no_texts)
    sizes = {"teacher_params": 200, "student_params": 50}
    log = [{"step": 0, "valid_loss": 3.5}, {"step": 10, "valid_loss": 1.75}, {"step": 20, "valid_loss": 1.25}]
    results = text.results({}, log, sizes)
    assert [results[name]["valid_loss"] for name in ("teacher", "untrained", "student")] == [None, 3.5, 1.25]
    assert text.table(results).rows == {"teacher": [""], "untrained": ["3.5000"], "student": ["1.2500"]}
