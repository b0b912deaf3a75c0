"""GGUF files: the weights are those of gguf's own dequantization, made once, whole or not at all."""

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models import gguf as module
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer

from gguf_model import TEMPLATE, rounded, write_gguf

TEACHER = locate("embedded:teacher")
TEXT = "The 1,204 lamps of Orrin – are they bluer\n\tthan 77?"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def q4(tmp_path_factory):
    return write_gguf(TEACHER, tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf", "Q4_1")


def test_the_weights_are_those_of_gguf_and_are_made_once_for_all_copies(q4, cache, tmp_path, capsys):
    folder = locate(str(q4))
    found = load_model(folder, dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    weights = rounded(TEACHER, "Q4_1")
    expected.load_state_dict(weights, strict=False)
    assert all(torch.equal(found.state_dict()[name], weight) for name, weight in weights.items())
    assert found.dtype == torch.float32
    own, other = load_tokenizer(folder), load_tokenizer(TEACHER)
    ids = other(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():  # the file keeps the epsilon of the norms in fp32
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=0, atol=1e-4)
    assert own(TEXT)["input_ids"] == ids[0].tolist()
    assert (own.eos_token, own.pad_token) == (other.eos_token, other.pad_token)
    assert own.chat_template == TEMPLATE
    assert module.origin(folder) == "dequantized from 4 bits (Q4_1)"
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["license"] == "cc0-1.0"

    said = f"tiny.Q4_1.gguf: dequantizing 4 bits (Q4_1), once; kept in {folder}\n"
    assert capsys.readouterr().err.count(said) == 1
    written = (folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "other").mkdir()
    shutil.copy(q4, tmp_path / "other" / "copy.gguf")
    assert locate(str(tmp_path / "other")) == folder, "a folder with one file"
    assert capsys.readouterr().err == f"copy.gguf: dequantized from 4 bits (Q4_1), kept in {folder}\n"
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert folder.parent == cache


def test_processes_that_need_it_at_the_same_time_make_it_once(q4, monkeypatch):
    made, meeting = [], threading.Barrier(2, timeout=120)
    write, about = module._write_folder, module._read_header
    monkeypatch.setattr(module, "_write_folder", lambda *given: made.append(write(*given)))
    # Both have found nothing by now.
    monkeypatch.setattr(module, "_read_header", lambda file: about(file) if meeting.wait() >= 0 else {})
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(locate, [str(q4)] * 2)
    assert first == second
    assert len(made) == 1


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_as_the_file_says(begins, tmp_path, capfd):
    file = write_gguf(TEACHER, tmp_path / "tiny.gguf", begins=begins)
    logging.enable_progress_bar()
    capfd.readouterr()
    tokenizer = load_tokenizer(locate(str(file)))
    begin, plain = [tokenizer.pad_token_id] * begins, load_tokenizer(TEACHER)(TEXT)["input_ids"]
    assert tokenizer(TEXT)["input_ids"] == begin + plain
    assert "it/s" not in capfd.readouterr().err, "no bar of transformers"
    assert logging.is_progress_bar_enabled()


def test_the_type_of_the_layers_is_said_beside_that_of_a_large_embedding(tmp_path):
    shapes = {
        "token_embd.weight": (512, "Q8_0"),
        "blk.0.ffn_up.weight": (64, "Q4_1"),
        "blk.1.ffn_up.weight": (32, "Q5_0"),
    }
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, (rows, kind) in shapes.items():
        of_weight = gguf.GGMLQuantizationType[kind]
        weight = gguf.quants.quantize(np.ones((rows, 32), np.float32), of_weight)
        writer.add_tensor(name, weight, raw_dtype=of_weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    about, _, _ = module._read_header(tmp_path / "a.gguf")
    (tmp_path / module.RECORD).write_text(json.dumps(about))
    assert module.origin(tmp_path) == "dequantized from 8 bits (Q8_0), layers 4 bits (Q4_1)"


def test_padding_is_said(tmp_path, capsys):
    folder = locate(str(write_gguf(TEACHER, tmp_path / "tiny.gguf", tokens=1000)))
    assert f"kept in {folder}; 24 rows of its embeddings are padding\n" in capsys.readouterr().err
    assert len(load_tokenizer(folder)) == 1000
    assert load_model(folder, dtype="auto").get_input_embeddings().weight.shape[0] == 1024


def rewritten(file, *, without="", architecture="llama", parts=0):
    """Write a file again: without a weight, of another architecture, or as one of several parts."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_suffix(".new"), architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), *field.types)
    if parts:
        writer.add_uint16("split.count", parts)
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").replace(file)


DAMAGES = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 5]), "cut or damaged, or not"),
    "architecture": (lambda file: rewritten(file, architecture="dinosaur"), r"does not read .* dinosaur is not supp"),
    "one part": (lambda file: rewritten(file, parts=3), "it is one of 3 parts: give the whole file"),
    "a weight less": (lambda file: rewritten(file, without="blk.1.ffn_up.weight"), "1 weights are missing, .*up_proj"),
    "tokens": (lambda file: write_gguf(TEACHER, file, rows=1000), "tokenizer has 1,024 tokens .* have 1,000 rows"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_read_is_one_sentence_and_leaves_nothing(damage, q4, cache, tmp_path):
    file = Path(shutil.copy(q4, tmp_path / "bad.gguf"))
    harm, said = DAMAGES[damage]
    harm(file)
    with pytest.raises(UserError, match=f"^{file}: .*{said}[^\n]*$"):
        locate(str(file))
    assert [each.name for each in cache.glob("*") if not each.name.endswith(".lock")] == []


def test_what_names_no_single_file_is_one_sentence_unless_it_is_a_model(q4, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"absent\.gguf: no such file: give the path of a GGUF file$"):
        locate(str(tmp_path / "absent.gguf"))
    shutil.copy(q4, tmp_path / "a.gguf")
    shutil.copy(q4, tmp_path / "b.gguf")
    with pytest.raises(UserError, match=r"no config\.json and 2 GGUF files: name one of them, such as .*a\.gguf$"):
        locate(str(tmp_path))
    shutil.copy(TEACHER / "config.json", tmp_path)
    assert locate(str(tmp_path)) == tmp_path
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        UserError, match=r'needs the package gguf: pip install -e "\.\[gguf\]" in a checkout of llmdistill$'
    ):
        locate(str(q4))
