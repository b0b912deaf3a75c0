"""The settings of sentence-transformers' files, and the embeddings that they ask for, sentence by sentence."""

import json
import math

import pytest
import torch
from sentence_encoders import encoder
from torch import nn

from llmdistill.errors import UserError
from llmdistill.models.load import load_model
from llmdistill.models.pooling import dense_of, load_dense, pool_tokens, read_sentence_settings, save_dense
from llmdistill.objective import Pooling

KINDS = ["Transformer", "Pooling", "Normalize"]


def folder_of(folder, kinds=KINDS, **files):
    """A folder with the files of sentence-transformers; `files` are by name without .json, 1_Pooling the pooling's."""
    (folder / "1_Pooling").mkdir(parents=True)
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], start=1))]
    modules = [{"path": path, "type": f"a.b.{kind}"} for path, kind in zip(paths, kinds, strict=True)]
    for name, values in {"modules": modules, **files}.items():
        file = folder / ("1_Pooling/config.json" if name == "pooling" else f"{name}.json")
        file.write_text(json.dumps(values))
    return folder


def test_settings_of_both_forms_of_the_files(tmp_path):
    old = folder_of(
        tmp_path / "old",
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        sentence_bert_config={"max_seq_length": 7, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"},
    )
    found = read_sentence_settings(old)
    assert (found.pooling, found.max_length) == (Pooling(("cls", "mean"), normalize=True), 7)
    assert found.text("One") == "q: one"
    new = folder_of(tmp_path / "new", KINDS[:2], pooling={"pooling_mode": "lasttoken"})
    found = read_sentence_settings(new)
    assert (found.pooling, found.max_length) == (Pooling(("lasttoken",)), None)
    assert found.text("One") == "One"
    assert read_sentence_settings(tmp_path) is None


@pytest.mark.parametrize(("kinds", "files", "said"), [
    (["Transformer", "Pooling", "Dense", "Dense"], {}, "the modules are Transformer, Pooling, Dense, Dense"),
    (KINDS, {"pooling": {"pooling_mode": "median"}}, "pooling_mode is median"),
    (KINDS, {"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt is false"),
    (KINDS, {"pooling": []}, "a list, not an object"),
    (KINDS, {"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length is 0"),
    (KINDS, {"config_sentence_transformers": {"prompts": {"query": 3}}}, "prompts is no object of texts"),
    (KINDS, {"config_sentence_transformers": {"prompts": {"w": ""}, "default_prompt_name": "v"}}, "name is 'v', which"),
])  # fmt: skip
def test_other_models_are_refused(tmp_path, kinds, files, said):
    with pytest.raises(UserError, match=said):
        read_sentence_settings(folder_of(tmp_path / "model", kinds, **{"pooling": {}, **files}))


def naive(rows, mode):
    """The embedding of the real tokens of one sentence, (T, W)."""
    places = torch.arange(1, len(rows) + 1)[:, None]
    return {
        "cls": rows[0],
        "lasttoken": rows[-1],
        "max": rows.max(0).values,
        "mean": rows.mean(0),
        "mean_sqrt_len_tokens": rows.sum(0) / math.sqrt(len(rows)),
        "weightedmean": (places * rows).sum(0) / places.sum(),
    }[mode]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_pooling(mode, side):
    lengths = [4, 1, 6]
    hidden = torch.full((3, 6, 5), math.nan, dtype=torch.float64)  # of which padding must stay without effect
    mask = torch.zeros(3, 6, dtype=torch.int64)
    expected = []
    for row, length in enumerate(lengths):
        here = slice(6 - length, 6) if side == "left" else slice(0, length)
        hidden[row, here] = torch.randn(length, 5, generator=torch.Generator().manual_seed(row)).double() - 3
        mask[row, here] = 1
        expected.append(naive(hidden[row, here], mode))
    found = pool_tokens(hidden, mask, Pooling((mode, "cls")))
    assert found.shape == (3, 10)
    torch.testing.assert_close(found[:, :5], torch.stack(expected))
    normal = pool_tokens(hidden, mask, Pooling((mode,), normalize=True))
    torch.testing.assert_close(normal, torch.stack([row / row.square().sum().sqrt() for row in expected]))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_dense_is_read_as_it_was_saved(tmp_path, normalize):
    model = encoder(tmp_path)
    dense = dense_of(nn.Linear(32, 5), nn.Tanh())
    save_dense(tmp_path, dense, dense.state_dict(), Pooling(("cls", "mean"), normalize=normalize))
    found = read_sentence_settings(tmp_path)
    assert found is not None
    assert set(found.pooling.modes) == {"cls", "mean"}
    assert found.pooling.normalize == normalize
    assert json.loads((tmp_path / "1_Pooling/config.json").read_text())["word_embedding_dimension"] == 16
    loaded = load_model(tmp_path, dtype=torch.bfloat16, head="embedding").sentence_dense
    assert isinstance(loaded.activation, nn.Tanh)
    assert not hasattr(load_model(tmp_path, dtype=torch.float32, head="none"), "sentence_dense")
    load_dense(model, tmp_path)
    hidden, mask = torch.randn(3, 4, 16), torch.ones(3, 4, dtype=torch.int64)
    both = torch.cat([hidden[:, 0], hidden.mean(1)], dim=1)
    expected = torch.tanh(both @ dense.linear.weight.T + dense.linear.bias)
    expected = expected / expected.norm(dim=1, keepdim=True) if normalize else expected
    torch.testing.assert_close(pool_tokens(hidden, mask, found.pooling, model.sentence_dense), expected)
    assert pool_tokens(hidden, mask, found.pooling, loaded).dtype == torch.float32


@pytest.mark.parametrize(("changes", "said"), [
    ({"activation_function": "torch.nn.modules.activation.ReLU"}, "with one of the activations"),
    ({"activation_function": "os.system"}, "with one of the activations"),
    ({"use_residual": True}, "a linear of the pooled embedding"),
    ({"module_input_name": "token_embeddings"}, "a linear of the pooled embedding"),
    (None, "not the weights of a Dense"),
])  # fmt: skip
def test_another_dense_is_refused(tmp_path, changes, said):
    model = encoder(tmp_path)
    dense = dense_of(nn.Linear(16, 5), nn.Identity())
    save_dense(tmp_path, dense, dense.state_dict() if changes is not None else {"weight": torch.zeros(2)}, Pooling())
    file = tmp_path / "2_Dense/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(changes or {})}))
    with pytest.raises(UserError, match=said):
        load_dense(model, tmp_path)
