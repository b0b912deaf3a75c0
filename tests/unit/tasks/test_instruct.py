import json
import math
from pathlib import Path

import pytest
import torch
from byte_tokenizers import byte_level
from chat_templates import CHATML
from hostile import refuses
from tiny import save_decoder, tiny_model
from word_models import word_tokenizer

from llmdistill.commands.evaluate import build_parser, chosen_sets, default_output, parse_scoring
from llmdistill.config import DataConfig, GenerationConfig, RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.data.chat_messages import Turn
from llmdistill.data.collate import sample_id
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode, encode_prompts
from llmdistill.data.sampler import Share
from llmdistill.data.sources import check_rows
from llmdistill.generation.decode import Decoding, generate_passes
from llmdistill.methods import METHODS
from llmdistill.tasks.base import LoadedModel
from llmdistill.tasks.instruction_scores import read_sets, score_sets
from llmdistill.tasks.instruction_sets import suite_sets
from llmdistill.tasks.instructions import InstructionData, Instructions
from llmdistill.tasks.rouge import rouge_l
from llmdistill.tasks.text_windows import TextTests
from llmdistill.training.plan import make_plan

from support import write_rows

WORDS = ("Below", "is", "Name", "a", "colour", "red", "green", "blue", "###", "Response", ":", "Input")
TOKENS = ("</s>", "[PAD]", "[UNK]", *WORDS)
LIMITS = {"max_prompt_length": 60, "max_length": 70}
EXAMPLES = [
    Example("Name a colour", "", ("red", "red green"), "x:1"),
    Example("Name", "a a", ("blue blue",), "x:2"),
    Example("a " * 30, "", ("green",), "x:3"),
]
SHORT = EXAMPLES[:2]


def loaded(model, tokenizer) -> LoadedModel:
    return LoadedModel(model=model, tokenizer=tokenizer)


def data_of(task: Instructions, **fields) -> InstructionData:
    """The data of a task that were not read."""
    missing = dict.fromkeys(("tokenizer", "teachers_tokenizer", "limits", "texts", "written_by"))
    return InstructionData(task=task, **{**missing, **fields})


@pytest.fixture
def tokenizer():
    return word_tokenizer(TOKENS, marked=False, eos_token="</s>")


@pytest.fixture
def model():
    return tiny_model("llama", vocab_size=len(TOKENS), max_position_embeddings=80, bos_token_id=None, eos_token_id=0)


def test_score_is_the_mean_over_seeds_and_predictions_are_kept(model, tokenizer, tmp_path):
    settings = GenerationConfig(decoding="sample", seeds=[10, 20, 30])
    lines: list[str] = []
    folder, limits = tmp_path / "new", Limits(**LIMITS)
    scores = score_sets(
        loaded(model, tokenizer),
        {"set": SHORT},
        settings,
        limits,
        predictions_dir=folder,
        log=lines.append,
    )
    score = scores["set"]
    prompts = encode_prompts(SHORT, tokenizer, limits).ids
    shared = {"no_repeat_ngram_size": settings.no_repeat_ngram_size, "batch_size": settings.batch_size}
    decoding = Decoding(sample=True, **shared, **LIMITS)
    passes = generate_passes(model, tokenizer, prompts, decoding, seeds=settings.seeds)
    texts = [each.texts for each in passes]
    expected = [rouge_l(answers, [example.outputs for example in SHORT]) for answers in texts]
    assert score["per_seed"] == expected
    assert len(set(expected)) > 1
    mean = sum(expected) / 3
    assert score["rougeL"] == pytest.approx(mean)
    assert score["std"] == pytest.approx((sum((one - mean) ** 2 for one in expected) / 2) ** 0.5)
    assert len(lines) == 3
    rows = [json.loads(line) for line in (folder / "set.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[0] == {
        "instruction": "Name a colour",
        "input": "",
        "references": ["red", "red green"],
        "predictions": {f"seed {seed}": answers[0] for seed, answers in zip(settings.seeds, texts, strict=True)},
    }
    assert [file.name for file in folder.iterdir()] == ["set.jsonl"], "nothing temporary stays"
    assert score["rouge_words"] == "stemmed"


def test_the_references_of_a_whole_set_choose_its_words(model, tmp_path):
    """The first example, which alone is scored, has Latin references."""
    words = ["red", "красный", "синий", "Name", "a", "colour"]
    tokenizer = word_tokenizer(["</s>", "[PAD]", "[UNK]", *words], marked=False, eos_token="</s>")
    examples = [Example("Name a colour", "", ("red",)), *(Example("Name", "", ("красный синий",)) for _ in range(3))]
    settings, limits = GenerationConfig(decoding="greedy", limit=1), Limits(**LIMITS)
    score = score_sets(loaded(model, tokenizer), {"set": examples}, settings, limits, predictions_dir=tmp_path)["set"]
    assert (score["rouge_words"], score["examples"]) == ("unicode", 1)
    task = Instructions(RunConfig(ds_config="", data=DataConfig(tests={"set": "set.jsonl"}), scoring=settings))
    tests = ({"set": examples}, {"set": examples[:1]})
    no_texts = TextTests(texts={}, settings=GenerationConfig(), models=None)
    unicode, stemmed = (data_of(task, tests=sets, limits=limits, texts=no_texts).sets["set"] for sets in tests)
    assert unicode == {**stemmed, "rouge_words": "unicode"}, "scores of older versions are not reused"
    results = {"student": {"rougeL": {"set": 5.0}, "rouge_words": {"set": "unicode"}}}
    legend = data_of(task, tests={"set": examples}, texts=no_texts).table(results).legend
    assert "ROUGE-L on set: F1 of Unicode words" in legend


def test_long_prompts(model, tokenizer, tmp_path):
    settings = GenerationConfig(decoding="greedy")
    for long_prompts, counts in (("drop", (2, 1, 0)), ("truncate", (3, 0, 1))):
        limits = Limits(max_prompt_length=45, max_length=50, long_prompts=long_prompts)
        score = score_sets(loaded(model, tokenizer), {"p": EXAMPLES}, settings, limits, predictions_dir=tmp_path)["p"]
        assert (score["examples"], score["dropped"], score["truncated"], score["std"]) == (*counts, None)
        lines = (tmp_path / "p.jsonl").read_text().splitlines()
        asked = [example.instruction for example in EXAMPLES[: counts[0]]]
        assert [json.loads(line)["instruction"] for line in lines] == asked


def test_bad_prompts_are_found_before_any_generation_and_any_model(model, tokenizer, tmp_path):
    sets = {"good": SHORT, "bad": EXAMPLES}
    shorter = Limits(max_prompt_length=45, max_length=50)
    said, given = "1 of 3 prompts are longer than data.max_prompt_length=45 tokens, first x:3", GenerationConfig()
    refuses(
        said,
        score_sets,
        loaded(model, tokenizer),
        sets,
        given,
        shorter,
        predictions_dir=tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()
    model.config.save_pretrained(tmp_path / "model")  # without weights
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"instruction": each.instruction, "input": each.input, "output": each.outputs} for each in EXAMPLES]
    data = {"bad": str(write_rows(tmp_path / "bad.jsonl", rows))}
    refuses("bad.jsonl:3", read_sets, str(tmp_path / "model"), data, GenerationConfig(), shorter)


def test_sets_by_name_come_from_the_hub_or_the_package_or_a_folder(tmp_path):
    found = suite_sets("dolly, vicuna,seen", None)
    assert list(found) == ["dolly", "vicuna", "seen"]
    assert found["dolly"].startswith("hf://datasets/MiniLLM/")
    refuses("no set 'squad' (there are dolly, self_inst", suite_sets, "dolly,squad", None)
    for name in ("dolly_sample.jsonl", "vicuna.jsonl", "vicuna_old.jsonl"):
        (tmp_path / name).touch()
    files = {"dolly": str(tmp_path / "dolly_sample.jsonl"), "vicuna": str(tmp_path / "vicuna.jsonl")}
    assert suite_sets("dolly,vicuna,seen", tmp_path) == {**files, "seen": "embedded:seen"}
    refuses("no self_inst.jsonl (there is dolly_sample.jsonl, vicuna.jsonl", suite_sets, "self_inst", tmp_path)


def test_only_the_sets_of_minillm_are_sampled_by_default():
    given = {"--data a.jsonl": "greedy", "--suite wikitext2": "greedy", "--suite wikitext2,dolly": "sample"}
    given |= {"--suite dolly --decoding greedy": "greedy", "--data a.jsonl --decoding sample": "sample"}
    assert {words: parse_scoring(f"--model m {words}".split()).decoding for words in given} == given


def test_suite_and_files_together_and_the_default_output():
    def chosen(*words):
        return chosen_sets(build_parser("evaluate").parse_args(["--model", "m", *words]))

    found = {"seen": "embedded:seen", "mine": "a/mine.jsonl", "skills": "embedded:skills"}
    assert chosen("--suite", "seen", "--data", "a/mine.jsonl", "embedded:skills") == found
    refuses("a/x.jsonl and b/x.jsonl would both be called x", chosen, "--data", "a/x.jsonl", "b/x.jsonl")
    refuses("both have a set called seen", chosen, "--suite", "seen", "--data", "a/seen.jsonl")
    refuses("--data is missing", chosen)
    assert default_output("embedded:teacher", "greedy") == Path("runs/evaluate/embedded-teacher-greedy")
    assert default_output("./runs/a b/student/", "sample") == Path("runs/evaluate/runs-a-b-student-sample")


def test_perplexity_is_that_of_first_references(tokenizer, model):
    """Against a loop over single tokens, without padding and batches."""
    limits = Limits(**LIMITS)
    losses = []
    for example, prompt in zip(SHORT, encode_prompts(SHORT, tokenizer, limits).ids, strict=True):
        ids = prompt.copy()
        for token in [*tokenizer(example.outputs[0], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
            with torch.no_grad():
                losses.append(-model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item())
            ids.append(token)
    settings = GenerationConfig(batch_size=2, limit=2)
    score = score_sets(loaded(model, tokenizer), {"set": EXAMPLES}, settings, limits)["set"]
    assert score["reference_tokens"] == len(losses) == 5
    assert score["reference_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(score["reference_loss"]))
    assert (score["examples"], score["total"]) == (2, 3)


def test_a_teacher_with_another_tokenizer_is_asked_by_its_own_chat_template(tmp_path: Path) -> None:
    turns = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}ASKED{{ '\n' }}{% endif %}{% endfor %}"
    tokenizers = {
        "student": byte_level(300, chat_template=f"S: {turns}".replace("ASKED", " A:")),
        "teacher": byte_level(
            420, end="</end>", start="<begin>", chat_template=f"<begin>{turns}".replace("ASKED", "?")
        ),
    }
    for name, tokenizer in tokenizers.items():
        save_decoder(tmp_path / name, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        tokenizer.save_pretrained(tmp_path / name)
    chat = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "sat"}]
    rows = [{"messages": chat}, {"instruction": "Name a colour", "input": "", "output": "red"}]
    train = write_rows(tmp_path / "train.jsonl", rows)
    given = ["--method", "kd", "--data.train", str(train), "--output_dir", str(tmp_path / "run")]
    for name in tokenizers:
        given += [f"--{name}.model", str(tmp_path / name)]
    plan = make_plan(parse_run(given, METHODS)[0], ranks=1)
    assert plan.models.translates
    found = plan.task.read(plan.models).prepare().teacher_prompts()
    for question in ("The cat", "Name a colour"):
        ours, theirs = (
            tokenizers[name](text, add_special_tokens=False)["input_ids"]
            for name, text in (("student", f"S: {question} A:\n"), ("teacher", f"<begin>{question}?\n"))
        )
        assert found[sample_id(ours)] == theirs
    assert len(found) == 2


def test_files_with_weights(tmp_path, monkeypatch, caplog):
    """Of three examples of an epoch two are from the small file; without weights an epoch has each example once."""
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    save_decoder(tmp_path / "model", vocab_size=300)
    byte_level(300, end="<|im_end|>").save_pretrained(tmp_path / "model")
    files = {
        name: write_rows(
            tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}", "completion": name} for n in range(size)]
        )
        for name, size in (("small", 4), ("large", 8))
    }
    counted = []
    for weights in (("=2", "=1"), ("", "")):
        train = f"{files['small']}{weights[0]},{files['large']}{weights[1]}"
        given = ["--method", "sft", "--teacher.model", str(tmp_path / "model"), "--student.factorize.rank", "2"]
        given += ["--data.train", train, "--data.valid", str(files["small"]), "--output_dir", str(tmp_path / "run")]
        given += ["--data.held_out", "0"]
        task = make_plan(parse_run(given, METHODS)[0], ranks=1)
        data = task.task.read(task.models).prepare()
        assert "4 of the 4 rows of data.valid are also in data.train" in caplog.text
        loader = data.loader(Share(seed=0, global_batch_size=4, micro_batch_size=4))
        epoch = [tuple(item.ids) for step in range(3) for batch in loader.micro_batch_items(step) for item in batch]
        taught = [tuple(item.ids) for item in data.teacher_examples()[0]]
        assert len(epoch) == len({*taught}) == 12, "the teacher teaches all examples"
        counted.append(sum(ids in taught[:4] for ids in epoch))
        assert ("Each epoch has 8 examples from the 4 of" in data.report) == bool(weights[0])
        refuses("weights are for data.train", check_rows, train) if weights[0] else check_rows(train)
    assert counted == [8, 4]


def test_a_teacher_at_chance_is_warned_of_and_each_set_is_a_column():
    task = Instructions(RunConfig(ds_config="", scoring=GenerationConfig(decoding="greedy")))
    known = ["another model wrote the answers"]
    no_texts = TextTests(texts={}, settings=GenerationConfig(), models=None)
    instructions = data_of(task, texts=no_texts, tests={"seen": [], "unseen": []}, data_warnings=known)
    good = {"valid": {"rougeL": 50.0, "chance": 12.0, "above_chance": True}}
    bad = {"valid": {"rougeL": 12.5, "chance": 12.0, "above_chance": False}}
    assert instructions.warnings(None) == instructions.warnings({}) == instructions.warnings(good) == known
    first, warning = instructions.warnings(bad)
    assert first == known[0]
    assert "at chance" in warning
    table = instructions.table({"student": {"rougeL": {"seen": 97.34, "unseen": 48.65}}})
    assert (list(table.columns), table.rows) == (["seen", "unseen"], {"student": ["97.3", "48.6"]})


@pytest.mark.parametrize(("prompt", "around"), [
    ("chat", "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"),
    ("minillm", "Below is an instruction"),
    ("Q: {instruction}\nA: ", "Q: "),
])  # fmt: skip
def test_held_out_questions_are_shown_as_they_were_asked(prompt, around):
    """The model reads them in its prompt, and a reader sees the question alone."""
    tokenizer = byte_level(300, end="<|im_end|>")
    tokenizer.chat_template = "<|im_start|>system\nYou help.<|im_end|>\n" + CHATML
    questions = ["Where is Ulma?", "Name two\n\nlakes."]
    examples = [Example(instruction=each, input="", outputs=("Here.",)) for each in questions]
    examples.append(Example("", "", ("Here.",), messages=(Turn("user", "Where?"),)))  # in the chat template
    limits = Limits(max_prompt_length=200, max_length=240, long_prompts="drop", prompt=prompt)
    task = Instructions(RunConfig(ds_config="", data=DataConfig(tests={})))  # the run finds its prompt itself
    data = data_of(task, tokenizer=tokenizer, limits=limits, held_out=encode(examples, tokenizer, limits).items)
    asked = data.held_out_questions()
    assert [each.prompt for each in asked] == [*questions, "Where?"]
    assert [each.reference for each in asked] == ["Here."] * 3
    assert around in tokenizer.decode(asked[0].prompt_ids)
