"""Perplexity on whole texts: against a plain loop over transformers' own logits, and what is refused."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hostile import refuses
from references import window_loss
from tokenizers import processors
from transformers import AutoTokenizer, BertConfig

from llmdistill.commands.evaluate import main
from llmdistill.config import DataConfig, RunConfig
from llmdistill.data.whole_text import WholeText
from llmdistill.embedded import locate
from llmdistill.losses import head
from llmdistill.models.load import load_model
from llmdistill.tasks import text_windows as module
from llmdistill.tasks.base import ScoreTable
from llmdistill.tasks.text_windows import TextTests, WindowSizes, cut_windows, score_windows
from tests import tiny

TEXT = "\n".join(f"Town {number} lies by a lake.\n\n = {number} = \n" for number in range(30))
pytestmark = pytest.mark.usefixtures("cpu_world")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(locate("embedded:teacher"))


@pytest.fixture(scope="module")
def model():
    return load_model(locate("embedded:teacher"), dtype=torch.float32)


@pytest.mark.parametrize(("window", "stride", "limit"), [(64, 16, None), (32, 31, 3), (17, 17, 5)])
def test_it_is_the_loss_of_a_plain_loop(model, tokenizer, window, stride, limit):
    ids = tokenizer(TEXT)["input_ids"]
    windows = cut_windows(TEXT, tokenizer, model.config, WindowSizes(window, stride, limit), name="text")
    total = len(range(0, len(ids) - window + 1, stride))
    score = score_windows(model, windows, batch_size=5)
    assert (score["windows"], score["total"]) == (min(limit or total, total), total)
    assert score["tokens"] == window - 1 + (score["windows"] - 1) * min(stride, window - 1)
    expected = window_loss(model, ids, window, stride, score["windows"])
    assert score["loss"] == pytest.approx(expected, abs=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def beginning(tokenizer, *names):
    """The tokenizer, which begins each text with these tokens."""
    found = copy.deepcopy(tokenizer)
    marks = [(name, found.convert_tokens_to_ids(name)) for name in names]
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{' '.join(names)} $A", special_tokens=marks
    )
    found.bos_token = names[0]
    return found, [index for _, index in marks]


@pytest.mark.parametrize("names", [("<|pad|>",), ("<|pad|>", "<|end|>")])
@pytest.mark.parametrize(("window", "stride", "limit"), [(64, 16, None), (33, None, 3), (17, 17, 5), (9, 3, None)])
def test_each_window_begins_as_the_tokenizer_begins_a_text(model, tokenizer, names, window, stride, limit):
    own, begin = beginning(tokenizer, *names)
    text = tokenizer(TEXT)["input_ids"]
    windows = cut_windows(TEXT, own, model.config, WindowSizes(window, stride, limit), name="text")
    score = score_windows(model, windows, batch_size=5)
    room = window - len(begin)
    step = min(stride or room, room)
    starts = range(0, len(text) - room + 1, step)[:limit]
    losses = {}
    for start in starts:
        ids = [*begin, *text[start : start + room]]
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(len(begin), window):
            # A token is scored in the first window that has it.
            losses.setdefault(start + place - len(begin), -float(log_probs[place - 1, ids[place]]))
    assert score["tokens"] == len(losses) == starts[-1] + room, "each token of the text once"
    assert score["loss"] == pytest.approx(sum(losses.values()) / len(losses), abs=1e-5)
    assert (score["window"], score["stride"], score["begin"]) == (window, step, "".join(names))


def test_a_window_has_room_for_the_text(model, tokenizer):
    own, _ = beginning(tokenizer, "<|pad|>", "<|end|>")
    given = (TEXT, own, model.config)
    refuses(
        "window is 2, but 2 of its tokens begin the text: give 3 or more", cut_windows, *given, WindowSizes(2), name=""
    )
    short = cut_windows("A lake.", own, model.config, WindowSizes(500, shorten=True), name="")
    assert short.window == 2 + len(tokenizer("A lake.")["input_ids"])


def test_the_command_and_a_run_say_what_a_window_begins_with(model, tokenizer, tmp_path, capsys):
    own, begin = beginning(tokenizer, "<|pad|>")
    model.save_pretrained(tmp_path / "model")
    own.save_pretrained(tmp_path / "model")
    (tmp_path / "lakes.txt").write_text(TEXT, encoding="utf-8")
    arguments = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "lakes.txt"), "--window", "33"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    assert "each window begins with <|pad|>" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["texts"]["lakes"]["begin"] == "<|pad|>"
    config = RunConfig(ds_config="", data=DataConfig(tests={"lakes": str(tmp_path / "lakes.txt")}))
    models = SimpleNamespace(teacher=model.config, student=model.config)
    texts, plain = (TextTests.of(config, models, [each, each]) for each in (own, tokenizer))
    assert texts.sets["lakes"] == {**plain.sets["lakes"], "begin": [begin, begin]}, "scores of before are not taken"
    read = score_windows(model, cut_windows(TEXT, own, model.config, WindowSizes(64), name=""), batch_size=2, name="")
    table = texts.add_columns(
        ScoreTable(title="", columns=[], rows={"teacher": []}, legend=""), {"teacher": {"texts": {"lakes": read}}}
    )
    assert "each begins with <|pad|>;" in table.legend


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_logits_that_are_more_than_a_product(kind, tokenizer):
    torch.manual_seed(0)
    model = tiny.tiny_model(kind, vocab_size=len(tokenizer)).eval()
    ids = tokenizer(TEXT)["input_ids"][:200]
    windows = cut_windows(tokenizer.decode(ids), tokenizer, model.config, WindowSizes(16), name="text")
    score = score_windows(model, windows, batch_size=3)
    assert score["loss"] == pytest.approx(window_loss(model, ids, 16, 16, 12), abs=1e-5)


def test_the_logits_of_a_batch_are_never_there(model, tokenizer, monkeypatch):
    rows = []
    real = head._compute_outputs
    monkeypatch.setattr(head, "_CPU_CHUNK", 16)
    monkeypatch.setattr(head, "_compute_outputs", lambda *given: rows.append(len(out := real(*given))) or out)
    score_windows(model, cut_windows(TEXT, tokenizer, model.config, WindowSizes(64), name=""), batch_size=4)
    assert max(rows) == 16
    assert sum(rows) == (64 - 1) * (len(tokenizer(TEXT)["input_ids"]) // 64)


@pytest.mark.parametrize(("batch_size", "tokens", "most"), [(5, 128, 2), (1, 8192, 1), (3, 8192, 3), (9, 32, 1)])
def test_a_forward_pass_reads_so_many_windows_and_tokens(model, tokenizer, monkeypatch, batch_size, tokens, most):
    monkeypatch.setattr(module, "_BATCH_TOKENS", {"cpu": tokens})
    windows, read = cut_windows(TEXT, tokenizer, model.config, WindowSizes(64, limit=7), name=""), []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: read.append(len(given["input_ids"])), with_kwargs=True
    )
    score_windows(model, windows, batch_size=batch_size)
    hook.remove()
    assert (sum(read), max(read)) == (7, most)


def test_the_lines_of_wikitext_are_rows_as_on_the_hub(tmp_path):
    rows = ["", " = Robert = \n", "", " He was .\n", " More .\n"]
    (tmp_path / "test.txt").write_text("".join(row or " \n" for row in rows), encoding="utf-8")
    joined = WholeText(tmp_path / "test.txt", lines=True).read()
    assert joined == "\n\n".join(rows) == WholeText(rows).read() == WholeText([{"text": row} for row in rows]).read()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert WholeText(tmp_path / "rows.jsonl").read() == joined


class TestTheCommand:
    def test_a_text_needs_no_flag_and_stands_beside_instructions(self, tmp_path, capsys, model, tokenizer):
        (tmp_path / "lakes.txt").write_text(TEXT, encoding="utf-8")
        arguments = ["--model", "embedded:teacher", "--data", str(tmp_path / "lakes.txt"), "embedded:skills"]
        arguments += ["--decoding", "greedy", "--limit", "2", "--window", "64", "--output", str(tmp_path / "out")]
        assert main([*arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        expected = window_loss(model, tokenizer(TEXT)["input_ids"], 64, 64, 2)
        assert found["texts"]["lakes"]["loss"] == pytest.approx(expected, abs=1e-5)
        assert found["texts"]["lakes"]["windows"] == 2
        assert found["sets"]["skills"]["examples"] == 2
        assert json.loads((tmp_path / "out" / "metrics.json").read_text())["texts"] == found["texts"]

    def test_wikitext_by_name(self, tmp_path, capsys):
        (tmp_path / "wikitext2").mkdir()
        (tmp_path / "wikitext2" / "test.txt").write_text(" \n = Lakes = \n \n" + " A lake .\n" * 80)
        for place in (tmp_path, tmp_path / "wikitext2", tmp_path / "wikitext2" / "test.txt"):
            arguments = ["--model", "embedded:teacher", "--suite", "wikitext2", "--data_dir", str(place)]
            assert main([*arguments, "--window", "32", "--limit", "2", "--output", str(tmp_path / "out")]) == 0
            assert "2 of" in capsys.readouterr().out
        assert main(["--model", "embedded:teacher", "--suite", "wikitext2", "--data_dir", str(tmp_path / "out")]) == 2
        assert "it has neither wikitext2.txt nor test.txt" in capsys.readouterr().err

    def test_bad_input_is_one_sentence(self, tmp_path, capsys, tokenizer):
        file = tmp_path / "text.txt"
        for text, arguments, said in (
            (" \n\n", [], "holds no text"),
            ("A lake.", [], "tokens, fewer than a window of"),
            (TEXT, ["--window", "100000"], "window is 100000, but llama has positions for"),
            (TEXT, ["--window", "16", "--stride", "17"], "stride is 17, but a window has 16 tokens"),
        ):
            file.write_text(text)
            assert main(["--model", "embedded:teacher", "--data", str(file), *arguments]) == 2
            error = capsys.readouterr().err.strip()
            assert said in error
            assert len(error.splitlines()) == 1
        refuses("take a decoder", cut_windows, TEXT, tokenizer, BertConfig(), WindowSizes(), name="text")
