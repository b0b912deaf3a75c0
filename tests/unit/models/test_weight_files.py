"""The weights that a folder names are safetensors of its own, whichever way the folder is read."""

import json
import os
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from planted import Payload
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import LlamaForCausalLM

from llmdistill.artifacts import entries_damage, entries_of
from llmdistill.errors import UserError
from llmdistill.files import is_outside
from llmdistill.models.configs import load_config
from llmdistill.models.load import check_files, load_model
from llmdistill.models.pooling import has_dense, load_dense, save_pooling
from llmdistill.models.weight_files import INDEX, REFUSAL, is_refusal
from llmdistill.objective import Pooling

PICKLED = ("evil.bin", "evil.pt", "evil", "evil.SAFETENSORS", "evil.safetensors.bin", "evil.safetensors ", "", 5, None)
OUTSIDE = (
    *("../outside.safetensors", "sub/../../outside.safetensors", "/outside.safetensors", "C:/outside.safetensors"),
    *("..\\outside.safetensors", "C:\\outside.safetensors", "\\\\host\\outside.safetensors", "sub\\in.safetensors"),
    *("link.safetensors", "folder-link/outside.safetensors", "a\x00.safetensors", "a\n.safetensors"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model in shards, with links that lead out of its folder; anything that unpickles a file fails."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="5kB")
    outside = load_file(sorted((tmp_path / "model").glob("*.safetensors"))[0])
    save_file(outside, tmp_path / "outside.safetensors")
    (tmp_path / "model" / "folder-link").symlink_to(tmp_path)
    (tmp_path / "model" / "sub").mkdir()
    torch.save(Payload(tmp_path / "code ran"), tmp_path / "model" / "evil.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle is read"))
    return tmp_path / "model"


def refused(folder, said):
    for read in (load_config, check_files, lambda path: load_model(path, dtype=torch.float32)):
        with pytest.raises(UserError, match=said) as caught:
            read(folder)
        assert str(folder) in str(caught.value)


def name_shard(folder, name):
    """Let the index name another file for one of the weights."""
    if name == "link.safetensors":  # would be refused already as it is there
        (folder / name).symlink_to(folder.parent / "outside.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))


def test_a_whole_model_in_shards_is_loaded(folder, tmp_path):
    assert load_model(folder, dtype=torch.float32).dtype == torch.float32
    (tmp_path / "elsewhere").symlink_to(folder)  # the folder itself may be a link
    load_model(tmp_path / "elsewhere", dtype=torch.float32)


@pytest.mark.parametrize("name", PICKLED)
def test_an_index_that_names_a_pickle(folder, name):
    name_shard(folder, name)
    refused(folder, "which is no safetensors file")


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leads_out(folder, name):
    name_shard(folder, name)
    refused(folder, "leads out of the model's folder" if name == "link.safetensors" else "lies outside of the folder")


@pytest.mark.parametrize("content", [[], {}, {"weight_map": {}}, {"metadata": {}, "weight_map": ["a.safetensors"]}, 1])
def test_an_index_that_is_none(folder, content):
    (folder / INDEX).write_text(json.dumps(content))
    refused(folder, "no objects metadata and weight_map")


@pytest.mark.parametrize("name", ["adapter_model.bin", "evil.bin", 5, "../outside.safetensors", "my.safetensors"])
def test_a_config_that_names_its_weights(folder, name):
    shutil.copy(folder / "evil.bin", folder / "adapter_model.bin")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    if name == "my.safetensors":
        for shard in folder.glob("model-*"):
            shard.unlink()
        save_file(tiny_model("llama").state_dict(), folder / name)
        (folder / INDEX).unlink()
        load_model(folder, dtype=torch.float32)
    else:
        refused(folder, "transformers_weights names")


def test_a_config_that_names_an_index(folder):
    name_shard(folder, "evil.bin")
    os.replace(folder / INDEX, folder / "my.safetensors.index.json")
    config = json.loads((folder / "config.json").read_text())
    settings = {**config, "transformers_weights": "my.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(settings))
    refused(folder, "'evil.bin', which is no safetensors file")


def test_the_words_of_a_student_are_those_of_every_version():
    assert is_refusal(REFUSAL)
    assert is_refusal(
        "this is a factorized student of llmdistill, which nothing else loads: pip install llmdistill, and write "
        "`import llmdistill` before the model is loaded"
    )
    assert not is_refusal("this is a factorized student of llmdistill/../../x.safetensors")
    assert not is_refusal("adapter_model.bin")


def test_an_adapter_is_a_file_of_its_own(folder, tmp_path):
    adapter = tmp_path / "adapter"
    base = LlamaForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(adapter)
    about = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**about, "base_model_name_or_path": "../model"}))
    load_model(adapter, dtype=torch.float32)
    weights = adapter / "adapter_model.safetensors"
    os.replace(weights, tmp_path / weights.name)
    weights.symlink_to(tmp_path / weights.name)
    with pytest.raises(UserError, match="leads out of the model's folder"):
        load_model(adapter, dtype=torch.float32)
    weights.unlink()
    shutil.copy(folder / "evil.bin", adapter / "adapter_model.bin")
    with pytest.raises(UserError, match=r"a pickled \.bin is never read"):
        load_model(adapter, dtype=torch.float32)
    os.replace(tmp_path / weights.name, weights)
    name_shard(folder, "evil.bin")  # of its base
    with pytest.raises(UserError, match=r"base_model_name_or_path: .*which is no safetensors file"):
        load_model(adapter, dtype=torch.float32)


@pytest.mark.parametrize("path", ["../outside", "/tmp/outside", "..\\outside", "link", "files", 5])
def test_modules_of_sentence_transformers_lie_in_the_folder(tmp_path, path):
    model, outside = tmp_path / "model", tmp_path / "outside"
    model.mkdir()
    save_pooling(model, 4, Pooling(), has_dense=True)
    assert has_dense(model)
    says = r"modules\.json: (it names the module .* not in the model's folder|not a list of modules)"
    own = model / "2_Dense"
    shutil.copytree(own, outside)
    (outside / "model.safetensors").write_bytes(b"")
    (model / "link").symlink_to(outside)
    (model / "files").mkdir()
    (model / "files" / "model.safetensors").symlink_to(outside / "model.safetensors")
    modules = json.loads((model / "modules.json").read_text())
    modules[2]["path"] = path
    (model / "modules.json").write_text(json.dumps(modules))
    for read in (has_dense, lambda folder: load_dense(tiny_model("bert"), folder)):
        with pytest.raises(UserError, match=says):
            read(model)


@pytest.mark.parametrize("name", [name for name in OUTSIDE if "link" not in name])
def test_a_record_that_leads_out_is_damaged(tmp_path, name):
    file = tmp_path / "folder" / "rank-00000.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    entries = entries_of(file.parent, [file.name])
    assert entries_damage(file.parent, entries) is None
    damage = entries_damage(file.parent, {name: entries[file.name]})
    assert damage is not None
    assert "outside of the folder" in damage


def test_the_links_of_the_hub_cache_lead_to_its_blobs(folder, tmp_path):
    of_hub = tmp_path / "models--org--name"
    snapshot, blobs = of_hub / "snapshots" / "1f", of_hub / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(each for each in folder.iterdir() if each.is_file())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load_model(snapshot, dtype=torch.float32)
    assert is_outside(snapshot, "../../blobs/0")  # a name is no link


def test_a_model_of_the_hub_with_a_pickle_in_its_index(folder, tmp_path, monkeypatch):
    name_shard(folder, "evil.bin")
    asked = []

    def cached_file(name, file, **_):
        asked.append((name, file))
        return str(folder / file)

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    with pytest.raises(UserError, match=r"'evil\.bin', which is no safetensors file"):
        check_files("org/name")
    assert asked == [("org/name", INDEX)]
