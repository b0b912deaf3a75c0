import json
import os
import sys

import pytest
import torch
import transformers
from byte_tokenizers import byte_level
from packaging.version import Version
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiny import tiny_config, tiny_model
from tokenizers import processors
from torch import Tensor
from transformers import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification, BertModel, LlamaTokenizer
from word_models import save_tokenizer

from llmdistill.api import evaluate
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import compare_vocabularies, load_tokenizer

BERT = tiny_config("bert")


@pytest.mark.parametrize(("saved", "head", "loaded"), [
    (BertForPreTraining, "pretraining", "BertForPreTraining"),
    (BertForPreTraining, "lm_head", "BertForMaskedLM"),
    (BertForMaskedLM, "none", "BertModel"),  # it has no pooler, which nothing reads
    (BertForSequenceClassification, "sequence", "BertForSequenceClassification"),
])  # fmt: skip
def test_a_head_that_is_there_is_loaded(tmp_path, saved, head, loaded):
    saved(BERT).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, head=head)
    assert type(model).__name__ == loaded
    weights = load_file(tmp_path / "model.safetensors")
    same = [name for name, value in model.state_dict().items() if name in weights and value.ndim > 1]
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in same)


@pytest.mark.parametrize(("saved", "head", "remedy"), [
    (BertModel, "lm_head", "set the weights of those on the output to 0"),
    (BertForMaskedLM, "pretraining", "data.text.next_sentence=false"),
    (BertForMaskedLM, "sequence", "with a classifier"),
])  # fmt: skip
def test_a_head_that_is_missing_is_an_error_or_new(tmp_path, saved, head, remedy):
    saved(BERT).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"weights are missing, such as .*{remedy}"):
        load_model(tmp_path, dtype=torch.float32, head=head)
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(load_model(tmp_path, dtype=torch.float32, head=head, new_head=True))
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)
    kept = load_file(tmp_path / "model.safetensors")
    words = next(value for name, value in kept.items() if name.endswith("word_embeddings.weight"))
    assert torch.equal(models[0].base_model.get_input_embeddings().weight, words)


def kept_for_backward(model) -> tuple[Tensor, int]:
    """The logits of a text, and the bytes that autograd keeps for its backward pass."""
    sizes: list[int] = []
    keep = lambda tensor: sizes.append(tensor.nbytes) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(torch.arange(20)[None]).logits
    return logits, sum(sizes)


def test_gelu_is_one_kernel_whose_values_are_those_of_transformers(tmp_path) -> None:
    stock = tiny_model("gpt2").eval()
    for layer in stock.transformer.h:
        layer.mlp.c_fc.weight.data *= 50  # so that GELU's two formulas differ
    stock.save_pretrained(tmp_path)
    (expected, kept_by_stock), (logits, kept) = map(
        kept_for_backward, (stock, load_model(tmp_path, dtype=torch.float32))
    )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    layers, of_a_layer = stock.config.n_layer, 4 * logits.shape[1] * stock.config.n_inner
    assert kept <= kept_by_stock - 3 * layers * of_a_layer
    assert load_config(tmp_path).activation_function == "gelu_new"


def test_a_missing_weight_is_named_and_excused_by_no_new_head(tmp_path):
    BertForMaskedLM(BERT).save_pretrained(tmp_path)
    weights, gone = load_file(tmp_path / "model.safetensors"), "bert.encoder.layer.1.output.dense.weight"
    save_file({name: value for name, value in weights.items() if name != gone}, tmp_path / "model.safetensors")
    for new_head in (False, True):
        with pytest.raises(UserError, match=f"1 weights are missing, such as {gone}"):
            load_model(tmp_path, dtype=torch.float32, head="lm_head", new_head=new_head)


def test_bad_folders(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load_config(tmp_path / "nowhere")
    for step, name in enumerate(("checkpoint-10", "checkpoint-9")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (step, step))
    with pytest.raises(UserError, match=r"config\.json; give the folder inside that has one, .*checkpoint-9$"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text('{\n "model_type": "llama",\n oops')
    with pytest.raises(UserError, match=r"config\.json:3: not valid JSON"):
        load_config(tmp_path)
    file.write_text('{"model_type": "no-such"}')
    with pytest.raises(UserError, match="does not know the model_type 'no-such'"):
        load_config(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        load_config(file)


def test_a_hub_that_does_not_answer(monkeypatch):
    def unreachable(*_, **__: object):
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr("llmdistill.models.configs.AutoConfig.from_pretrained", unreachable)
    monkeypatch.setattr("transformers.utils.peft_utils.find_adapter_config_file", unreachable)
    with pytest.raises(UserError, match=r"org/name is no folder here.*We couldn't connect to the hub\)") as caught:
        load_config("org/name")
    assert "\n" not in str(caught.value)


def test_damaged_and_pickled_weights_are_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: each.clone() for name, each in load_file(file).items()}  # the file's own are gone with it

    def refused(said):
        with pytest.raises(UserError, match=said):
            load_model(tmp_path, dtype=torch.float32)

    save_file({**weights, "model.norm.weight": torch.ones(8)}, file, metadata={"format": "pt"})
    refused("cannot be loaded")
    file.write_bytes(file.read_bytes()[:200])
    refused("cannot be loaded")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    file.unlink()
    refused(r"its weights are pickled \(pytorch_model.bin\), and .* save_pretrained of transformers write")
    # Files of other names, to which an index leads transformers, are no exception.
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "part.pt")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "part.pt")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refused("cannot be loaded")


def tokenizer_of(folder, words, **settings):
    save_tokenizer(folder, words, marked=False, **settings)
    return folder


def test_padding_token_is_the_end_token_where_there_is_none(tmp_path):
    words = ["[UNK]", "a", "</s>", "[PAD]"]
    own = load_tokenizer(tokenizer_of(tmp_path / "own", words, eos_token="</s>", padding_side="left"))
    assert (own.pad_token_id, own.eos_token_id, own.padding_side) == (3, 2, "left")
    plain = load_tokenizer(tokenizer_of(tmp_path / "plain", words[:3], eos_token="</s>"))
    assert (plain.pad_token_id, plain.eos_token_id) == (2, 2)


def test_the_template_of_a_processor_is_that_of_its_tokenizer(tmp_path):
    folder = tokenizer_of(tmp_path / "a", ["the", "</s>"], eos_token="</s>")
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content[0].text }}"}')
    assert load_tokenizer(folder).chat_template == "{{ messages[0].content[0].text }}"
    (folder / "chat_template.jinja").write_text("newer")
    assert load_tokenizer(folder).chat_template == "newer"


def test_a_bare_tokenizer_finds_its_end_token(tmp_path):
    def bare(name, words):
        folder = tokenizer_of(tmp_path / name, words)
        (folder / "tokenizer_config.json").unlink()
        return folder

    gpt2 = load_tokenizer(bare("gpt2", ["[UNK]", "a", "<|endoftext|>"]))
    assert gpt2.eos_token_id == gpt2.pad_token_id == 2
    with_config = bare("config", ["[UNK]", "a", "end", "<|endoftext|>"])
    tiny_config("llama").save_pretrained(with_config)
    assert load_tokenizer(with_config).eos_token == "end"
    with pytest.raises(UserError, match="names no end token"):
        load_tokenizer(bare("none", ["[UNK]", "a"]))


def test_padded_vocabularies_share_what_both_have(tmp_path):
    def vocabulary(size):
        """A model of so many vocabulary rows."""
        folder = tokenizer_of(tmp_path / str(size), ["[UNK]", "a", "</s>", "b"], eos_token="</s>")
        tiny_config("llama", vocab_size=size).save_pretrained(folder)
        return folder

    small, large = vocabulary(28), vocabulary(1030)
    assert compare_vocabularies(large, small)[0] == compare_vocabularies(small, large)[0] == 28
    # Four tokens need four rows; with three the last one has no embedding, and that is no padding.
    assert compare_vocabularies(large, vocabulary(4))[0] == 4
    with pytest.raises(UserError, match=r"token 'b' has the id 3, and the model has 3 embeddings: take"):
        compare_vocabularies(large, vocabulary(3))


@pytest.mark.parametrize("adds", [True, False, None])
def test_a_begin_token_that_the_settings_ask_for_is_added(tmp_path, adds):
    tokenizer = byte_level(300, start="<begin>")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **({} if adds is None else {"add_bos_token": adds})}))
    loaded, plain = load_tokenizer(tmp_path / "tokenizer"), tokenizer("The cat")["input_ids"]
    assert loaded("The cat")["input_ids"] == [loaded.bos_token_id] * (adds is True) + plain
    loaded.save_pretrained(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again")("The cat") == loaded("The cat"), "a student begins as its teacher"


# Tokenizers that are a sentencepiece model and nothing else, against sentencepiece itself.

LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def texts():
    examples = read_examples(locate("embedded:train"))[:200]
    return [text for example in examples for text in (example.instruction, example.outputs[0])]


def llama_style(folder, texts, model_type="bpe"):
    folder.mkdir(exist_ok=True)
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    options |= {"vocab_size": 400, "minloglevel": 2, "num_threads": 1, "model_type": model_type}
    SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"), **options)
    (folder / "tokenizer.vocab").unlink()
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_llama_style(tmp_path, texts):
    model = llama_style(tmp_path, texts)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, LlamaTokenizer)
    assert len(tokenizer) == 400
    # Accents and symbols outside the vocabulary become bytes.
    for text in [*texts, "Ünïcode — 3 €", "two  spaces", "a\nline"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == model.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == model.bos_id()
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.eos_id()
    assert tokenizer.get_vocab() == {model.id_to_piece(i): i for i in range(400)}


def test_a_model_that_would_be_misread_is_refused_and_a_missing_package_named(tmp_path, texts, monkeypatch):
    bare, unigram = tmp_path / "bare", tmp_path / "unigram"
    model = llama_style(bare, texts)
    if Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(UserError, match=r"tokenizer\.model: .* cuts text otherwise .* tokenizer_class"):
            load_tokenizer(bare)
    else:  # it reads the kind of the model from its file
        tokenizer = load_tokenizer(bare)
        assert [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts] == model.encode(list(texts))
    llama_style(unigram, texts, "unigram")
    (unigram / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(UserError, match=r"as a LlamaTokenizer it cuts text otherwise .* type BPE"):
        load_tokenizer(unigram)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(UserError, match="needs the package protobuf: pip install protobuf"):
        load_tokenizer(unigram)


def test_a_tensor_that_the_model_has_no_place_for_is_told(tmp_path, caplog):

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "llmdistill"]

    biased = tiny_model("llama", attention_bias=True)
    for layer in biased.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    biased.save_pretrained(tmp_path)
    load_model(tmp_path, dtype=torch.float32)
    assert said() == []
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "attention_bias": False}))
    plain = load_model(tmp_path, dtype=torch.float32)  # as transformers does, which says so in a report
    ids = torch.arange(8)[None]
    assert not torch.allclose(plain(ids).logits, biased.eval()(ids).logits, atol=1e-3)
    assert (
        "8 of its tensors have no place in a LlamaForCausalLM of its config.json, such as model.layers.0" in caplog.text
    )
    caplog.clear()
    # Old buffers and other heads are no parameters of a module that is there.
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    weights = load_file(tmp_path / "gpt2" / "model.safetensors")
    weights |= {"transformer.h.0.attn.bias": torch.ones(1), "score.weight": torch.ones(2, 2)}
    save_file(weights, tmp_path / "gpt2" / "model.safetensors", metadata={"format": "pt"})
    load_model(tmp_path / "gpt2", dtype=torch.float32)
    BertForSequenceClassification(BERT).save_pretrained(tmp_path / "bert")
    load_model(tmp_path / "bert", dtype=torch.float32, head="none")
    assert said() == []


def test_pointers_and_code_of_a_download_are_named(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    byte_level(264).save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    (tmp_path / "tokenizer.json").write_text(pointer)
    with pytest.raises(UserError, match=r"tokenizer\.json: it is a pointer of Git LFS"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(whole)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["t.Own", null]}}'
    )
    with pytest.raises(UserError, match=r"its tokenizer needs code of the model's own \(auto_map\), and none is run"):
        load_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match=r"model\.safetensors: it is a pointer of Git LFS"):
        load_model(tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "c.Own"}}')
    with pytest.raises(UserError, match=r"its model_type 'own' needs code of the model's own"):
        load_config(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(UserError, match=r"no tokenizer there .*: tekken\.json is not read, take the tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no tokenizer there"):  # and not that a str lacks one
        evaluate(tmp_path, [{"instruction": "a", "output": "b"}])
