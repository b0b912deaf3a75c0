"""The scripts of scripts/examples/, whole, on tiny models: a user's own model, given as an argument."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizers import byte_level
from pages import ROOT
from tiny import save_decoder, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, BertModel

from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    METHODS.pop("mine", None)


def decoder() -> str:
    return str(save_decoder(Path("decoder"), num_hidden_layers=2, tie_word_embeddings=False, initializer_range=0.02))


def rows() -> str:
    made = [{"instruction": f"Where is {i}?", "input": "", "output": f"In town {i % 7}."} for i in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return "rows.jsonl"


def run(name: str, *arguments: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        return runpy.run_path(str(ROOT / "scripts/examples" / name), run_name="__main__")


@pytest.mark.slow
def test_compress_my_llama(capsys):
    data = rows()
    arguments = ["--teacher", decoder(), "--train", data, "--test", data, "--size", "90%"]
    names = run("compress_my_llama.py", *arguments, "--steps", "2", "--limit", "2", "--output", "run")
    printed = capsys.readouterr().out
    assert names["model"].num_parameters() == names["student"].num_parameters() < names["size"]["teacher_params"]
    assert f"student {names['size']['student_params']:,}" in printed
    for model in ("teacher", "untrained", "student"):
        score = names["result"].metrics[model]["rougeL"]["test"]
        assert f"ROUGE-L of the {model}: {score:.1f}\n" in printed
    assert names["model"].device.type == "cpu"
    written = names["tokenizer"].decode(names["answer"], skip_special_tokens=True)
    assert printed.endswith(f"Where is 0?\n\n### Response:\n\n{written}\n(right is In town 0.)\n")


@pytest.mark.slow
def test_small_encoder_for_retrieval(capsys, monkeypatch):
    tokenizer, teacher = AutoTokenizer.from_pretrained(locate("embedded:teacher")), "encoder"
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "max_position_embeddings": 512}
    torch.manual_seed(0)
    BertModel(tiny_config("bert", initializer_range=0.5, **sizes)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    modules = [{"path": path, "type": f"x.{path[2:] or 'Transformer'}"} for path in ("", "1_Pooling")]
    Path(teacher, "modules.json").write_text(json.dumps(modules))
    Path("mine.txt").write_text("".join(f"The town {i} lies by lake {i * i}.\n" for i in range(60)))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    arguments = ["--teacher", teacher, "--sentences", "mine.txt", "--size", "90%", "--steps", "2", "--output", "run"]
    names = run("small_encoder_for_retrieval.py", *arguments)
    printed = capsys.readouterr().out
    assert (len(names["learned"]), len(names["scored"])) == (54, 5)
    # The teacher's own cosines, by the run and by the script.
    assert names["result"].metrics["teacher"]["spearman"]["sts"] == pytest.approx(100)
    score = names["result"].metrics["student"]["spearman"]["sts"]
    assert f"Spearman x 100: {score:.1f}\nthe search is skipped: pip install sentence-transformers\n" in printed
    assert Path("run/student/modules.json").is_file()


def test_my_own_loss(capsys):
    data = rows()
    arguments = ["--teacher", decoder(), "--train", data, "--test", data, "--size", "90%", "--steps", "2"]
    names = run("my_own_loss.py", *arguments, "--limit", "2")
    assert {"hellinger", "angle", "label"} <= names["result"].history[-1].keys()
    # The terms again, from the stock outputs of both models.
    batch, terms = names["batch"], names["loss"](names["batch"]).terms
    names["loss"].remove()
    with torch.no_grad():
        student, teacher = (names[name](**batch, output_hidden_states=True) for name in ("student", "teacher"))
        learned = batch["labels"][:, 1:] != -100
        p, q = (output.logits[:, :-1][learned].softmax(-1) for output in (teacher, student))
        real = batch["attention_mask"] == 1
        hidden = [output.hidden_states[-1][real] for output in (teacher, student)]
    # It is 1e-4 here, as 1 minus a sum that fp32 knows to about 1e-7: the error is absolute.
    hellinger = 0.5 * (p.sqrt() - q.sqrt()).square().sum(-1).mean().item()
    assert terms["hellinger"].item() == pytest.approx(hellinger, rel=0, abs=2e-6)
    assert terms["label"].item() == pytest.approx(student.loss.item(), rel=1e-4)
    # transformers gives what comes after the final norm; its weights are still nearly 1, so that it keeps the angles.
    cosines = torch.cosine_similarity(*hidden, dim=-1)
    assert terms["angle"].item() == pytest.approx(1 - cosines.mean().item(), rel=0, abs=2e-3)
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


SEES = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 28},
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    },
}


@pytest.mark.parametrize("kind", SEES)
def test_language_model_alone(kind, capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 0}
    parts = {name: {**part, **(sizes | heads if name == "text_config" else {})} for name, part in SEES[kind].items()}
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **parts)).eval()
    whole.save_pretrained("whole")
    byte_level(264).save_pretrained("whole")
    with pytest.raises(UserError, match="take its language model alone, which scripts/examples/language_model_alone"):
        load_config("whole")
    run("language_model_alone.py", "--model", "whole", "--output", "alone")
    tokens = torch.arange(100, 120)[None]
    alone = load_model("alone", dtype=torch.float32)
    torch.testing.assert_close(alone(tokens).logits, whole(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
    ids = [tokenizer("Where is it?").input_ids for tokenizer in map(AutoTokenizer.from_pretrained, ("alone", "whole"))]
    assert ids[0] == ids[1]
    assert f"{alone.num_parameters():,} of {whole.num_parameters():,} parameters" in capsys.readouterr().out


def test_other_tokenizer(capsys):
    """A token of both tokenizers keeps its vector; another has the mean of those that the teacher reads in its text."""
    run("other_tokenizer.py", "--teacher", decoder(), "--output", "other")
    assert "other: 512 tokens in place of the teacher's 1,024\n" in capsys.readouterr().out
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in ("decoder", "other"))
    given, made = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("decoder", "other"))
    table, vectors = (model.get_input_embeddings().weight for model in (given, made))
    assert vectors.shape == (len(new), given.config.hidden_size)
    whole = [token for token in new.get_vocab() if token in old.get_vocab()]
    split = [token for token in new.get_vocab() if token not in old.get_vocab() and token != new.eos_token]
    assert whole
    assert split
    for token in whole:
        assert torch.equal(vectors[new.get_vocab()[token]], table[old.get_vocab()[token]])
    for token in split:
        text = new.decode([new.get_vocab()[token]])
        expected = torch.stack([table[index] for index in old(text, add_special_tokens=False).input_ids]).mean(0)
        torch.testing.assert_close(vectors[new.get_vocab()[token]], expected)
    for name, value in given.model.layers.state_dict().items():
        assert torch.equal(made.model.layers.state_dict()[name], value)
    assert made.config.eos_token_id == made.generation_config.eos_token_id == new.eos_token_id


@pytest.mark.slow
def test_plain_loop(capsys):
    """On the embedded world: both students get better at what the training data leave out, and MaKD's more so."""
    names = run("plain_loop.py", "--steps", "5", "--batch_size", "8", "--output", "student")
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if "perplexity" in line]
    found = {line[0].removesuffix(":"): float(line[-1]) for line in printed}
    assert 1 < found["teacher"] < found["makd"] < found["kd"] < found["untrained"]
    # The score again, without padding, from the loss that transformers computes.
    test = [{key: torch.tensor([row]) for key, row in each.items()} for each in names["test"]]
    counts = [int((each["labels"] != -100).sum()) for each in test]
    with torch.no_grad():
        sums = [names["teacher"](**each).loss * count for each, count in zip(test, counts, strict=True)]
    expected = torch.stack(sums).sum() / sum(counts)
    assert found["teacher"] == pytest.approx(expected.exp().item(), abs=1e-3)
    # The student in its folder is the one that was scored.
    loaded, tokens = AutoModelForCausalLM.from_pretrained("student").eval(), test[0]["input_ids"]
    assert torch.equal(loaded(tokens).logits, names["student"](tokens).logits)
