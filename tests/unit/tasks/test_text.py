"""Pairs of segments, several languages and epochs of a text, as a run reads them."""

import json
import re
from functools import partial

import pytest
import torch
from byte_tokenizers import byte_level
from hostile import refuses
from tiny import tiny_model
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, PreTrainedConfig, RobertaConfig
from word_models import save_bert, save_tokenizer

import llmdistill
from llmdistill.batch import IGNORE_INDEX
from llmdistill.config import DataConfig, GenerationConfig, RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.data.sampler import Share
from llmdistill.methods import METHODS
from llmdistill.planning.dry_run import describe_plan
from llmdistill.runtime.distributed import World
from llmdistill.runtime.engine import learning_rate
from llmdistill.runtime.environment import Finding
from llmdistill.tasks.text import Text, TextData
from llmdistill.tasks.text_windows import TextTests
from llmdistill.training import assemble
from llmdistill.training.calibration import calibration_batches
from llmdistill.training.cost import estimate_cost
from llmdistill.training.headline import headline
from llmdistill.training.plan import Plan, make_plan

TOKENS = [f"w{number}" for number in range(20)]
SIZES = {"vocab_size": 25, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16}
BERT, ROBERTA = BertConfig(**SIZES), RobertaConfig(**SIZES, type_vocab_size=1)


@pytest.fixture
def parse(tmp_path):
    """The configuration of a run on thirty documents of 25 words whose teacher has this config."""

    def run(config: PreTrainedConfig, architecture: str, *arguments: str) -> RunConfig:
        folder, text = tmp_path / "teacher", tmp_path / "text.txt"
        config.architectures = [architecture]
        config.save_pretrained(folder)
        names = ["input_ids", "token_type_ids", "attention_mask"]
        save_tokenizer(folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOKENS], model_input_names=names)
        if not text.exists():
            text.write_text("\n\n".join(" ".join((TOKENS * 2)[n % 10 :][:25]) for n in range(30)), encoding="utf-8")
        words = ["--teacher.model", str(folder), "--student.shape", "1x8x4", "--data.kind", "text"]
        words += ["--data.train", str(text), "--data.max_length", "24", "--data.cache_dir", str(tmp_path / "cache")]
        return parse_run([*words, *arguments], METHODS)[0]

    return run


def prepared(plan: Plan) -> Text:
    return plan.task.read(plan.models).prepare()


@pytest.fixture
def data_of(parse):
    """Reads the text of a run."""
    return lambda *given: prepared(make_plan(parse(*given)))


def first_batch(data: Text):
    return data.loader(Share(seed=0, global_batch_size=8, micro_batch_size=8)).micro_batches(0)[0]


def test_the_embedding_of_the_second_segment_learns(data_of):
    batch = first_batch(data_of(BERT, "BertForPreTraining", "--method", "minilm"))
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


@pytest.mark.parametrize("begins", [True, False])
def test_training_cache_and_calibration_begin_each_sequence_as_the_tokenizer_does(tmp_path, begins):
    tokenizer = byte_level(300, start="<begin>" if begins else None)
    tiny_model("llama", vocab_size=300).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("\n\n".join(f"Lake {n} lies there.\n" * 3 for n in range(40)))
    words = ["--teacher.model", str(tmp_path / "teacher"), "--method", "kd", "--data.kind", "text"]
    words += ["--data.train", str(tmp_path / "text.txt"), "--data.valid", str(tmp_path / "text.txt")]
    words += ["--data.max_length", "24", "--data.cache_dir", str(tmp_path / "cache"), "--student.factorize.rank", "4"]
    words += ["--student.factorize.weighting", "gradients", "--student.factorize.calibration.examples", "16"]
    config = parse_run(words, METHODS)[0]
    plan = make_plan(config)
    data, share = prepared(plan), Share(seed=0, global_batch_size=8, micro_batch_size=8)
    items, collate = data.teacher_examples()
    calibration = [batch for each in calibration_batches(config, plan.models) for batch in each]
    batches = [first_batch(data), *data.validation(share), collate([items[n] for n in range(len(items))]), *calibration]
    assert len(batches) > 4
    for batch in batches:
        assert batch.input_ids.shape[1] <= 24
        is_begin = batch.input_ids == tokenizer.convert_tokens_to_ids("<begin>") if begins else batch.labels < -200
        assert is_begin[:, 0].all() == begins
        assert not is_begin[:, 1:].any()
        assert (batch.labels[is_begin] == IGNORE_INDEX).all()
    assert ("each sequence begins with <begin>" in data.report) == begins


def test_languages_are_sampled_by_a_power_of_their_sizes(data_of, tmp_path):
    folder = tmp_path / "languages"
    (folder / "small").mkdir(parents=True)
    for name, count in (("large.txt", 90), ("small/first.txt", 5), ("small/second.txt", 5)):
        (folder / name).write_text("\n\n".join(" ".join(TOKENS) for _ in range(count)), encoding="utf-8")
    settings = ("--method", "minilm", "--data.train", str(folder), "--data.text.pairs", "false")
    plain = data_of(BERT, "BertForPreTraining", *settings)
    mixed = data_of(BERT, "BertForPreTraining", *settings, "--data.text.sampling_exponent", "0.3")
    shares = "{} (.*)% of the text and (.*)% of the batches"
    pattern = f"2 parts: {shares.format('large')}, {shares.format('small')}"
    large, of_large, small, of_small = map(float, re.fullmatch(pattern, mixed.report).groups())
    assert large / small == pytest.approx(9, rel=0.1)  # a rest makes a sequence too
    assert of_large / of_small == pytest.approx((large / small) ** 0.3, rel=0.03)
    assert abs(mixed.num_steps(1, 8) - plain.num_steps(1, 8)) <= 1
    assert first_batch(mixed).input_ids.shape == first_batch(plain).input_ids.shape


def test_a_text_shows_its_validation_loss_before_and_after():
    no_texts = TextTests(texts={}, settings=GenerationConfig(), models=None)
    task = Text(RunConfig(ds_config="", data=DataConfig(kind="text", train="a.txt")))
    text = TextData(task=task, tokenizer=None, teachers_tokenizer=None, models=None, texts=no_texts)
    sizes = {"teacher_params": 200, "student_params": 50}
    log = [{"step": 0, "valid_loss": 3.5}, {"step": 10, "valid_loss": 1.75}, {"step": 20, "valid_loss": 1.25}]
    results = text.results({}, log, sizes)
    assert [results[name]["valid_loss"] for name in ("teacher", "untrained", "student")] == [None, 3.5, 1.25]
    assert text.table(results).rows == {"teacher": [""], "untrained": ["3.5000"], "student": ["1.2500"]}


@pytest.fixture
def short(parse):
    """Settings of a run on sequences of 12 tokens, 10 of them words."""
    words = ["--ds_config", "zero2", "--method", "sft", "--data.max_length", "12", "--data.text.pairs", "false"]
    words += ["--train.global_batch_size", "8", "--train.learning_rate", "0.5", "--train.schedule", "linear"]
    return partial(parse, BERT, "BertForMaskedLM", *words)


def counted(config: RunConfig) -> Plan:
    plan = make_plan(config)
    return assemble.with_counted_steps(plan, prepared(plan))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_missing_kernels_of_a_gpu_are_a_warning(short, monkeypatch, capsys, device):
    monkeypatch.setattr(assemble, "kernels", lambda: Finding("warning", "fused losses", "no Triton", "install it"))
    with World(0, 1, torch.device(device)).entered():
        assemble.check_machine(make_plan(short()))
    assert ("fused losses: no Triton; install it" in capsys.readouterr().err) == (device == "cuda")


# 30 documents of 25 words with a separator between two are 779 tokens, ten a sequence: 78 sequences, the last of nine.
@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (4, 39)])
def test_epochs_are_steps_rounded_up(short, epochs, steps):
    plan = counted(short("--train.epochs", str(epochs)))
    train = plan.config.train
    assert (train.steps, train.epochs) == (steps, None)
    assert learning_rate(train, steps - 1) == pytest.approx(0.5 / steps), "the decay ends with the last epoch"
    assert estimate_cost(plan)["tokens"] == steps * 8 * 12
    assert f"{epochs} epoch(s) are {steps} steps" in headline(plan, "a text")
    assert counted(short("--train.epochs", str(epochs))).config == plan.config, "a resumed run finds its steps"
    assert plan.recorded.train.epochs == epochs, "the folder knows the run by what was asked"


def test_epochs_are_those_of_the_fraction_and_the_validation_text_stays_whole(short, tmp_path, caplog):
    valid = ("--data.valid", str(tmp_path / "text.txt"))
    config = short("--train.epochs", "2", "--data.text.fraction", "0.2", *valid)
    data = prepared(make_plan(config))
    assert "text.txt: the validation loss says nothing about new rows" in caplog.text
    assert data.report.startswith("20 % of it: 6 documents, 6 segments, 150 tokens")
    assert (len(data.train[""].documents) - 1, len(data.valid.documents) - 1) == (6, 30)
    # 155 tokens with the separators are 16 sequences, the last of five left out.
    assert counted(config).config.train.steps == -(-2 * 15 // 8)
    plan = counted(short("--train.steps", "7"))
    assert (plan.config.train.steps, plan.notes) == (7, [])
    assert counted(short("--method", "none", "--train.epochs", "2")).config.train.epochs == 2, "nothing is trained"
    # A dry run does not know the steps.
    found = describe_plan(make_plan(short("--train.epochs", "3")))
    assert (found["estimate"], found["config"]["train"]["steps"], found["config"]["train"]["epochs"]) == (None, None, 3)
    assert "the steps of train.epochs 3, and so the cost, are known once" in found["notes"][0]
    json.dumps(found)


def test_bad_settings_and_a_share_too_small_for_a_sequence(short, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(["w1 w2 w3"] * 30), encoding="utf-8")
    small = short("--data.text.fraction", "0.04", "--train.epochs", "2")
    refuses("of data.text.fraction 0.04: the text has only ", counted, small)
    for arguments, said in (
        (("--train.epochs", "2", "--train.steps", "9"), "train.epochs is 2 and train.steps 9: both say how long"),
        (("--data.text.fraction", "0"), "data.text.fraction is 0.0: give a share over 0 and up to 1"),
    ):
        refuses(said, short, *arguments)


def test_an_encoder_is_scored_in_sequences_that_it_has_positions_for(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOKENS]
    save_bert(tmp_path / "model", words, BertForMaskedLM, max_position_embeddings=16)
    save_tokenizer(tmp_path / "model", words)
    texts = [" ".join(TOKENS * 5)] * 2
    usual = llmdistill.evaluate(tmp_path / "model", texts, kind="text")
    assert usual == llmdistill.evaluate(tmp_path / "model", texts, kind="text", max_prompt_length=4, max_length=16)
