import json
import shutil

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score
from tiny import tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llmdistill.data.pairs import encode_pairs
from llmdistill.models.load import load_model
from llmdistill.papers.fine_tuning import tsne
from llmdistill.papers.fine_tuning.protocols import short_names
from llmdistill.tasks.glue import read_split


def features_of(path, data, layer, aspect="hidden"):
    model, tokenizer = load_model(path, dtype=torch.float32, head="sequence"), AutoTokenizer.from_pretrained(path)
    items = encode_pairs(read_split("RTE", "dev", data), tokenizer, 24)
    return tsne.layer_features(model, items, layer=layer, aspect=aspect, pad_token_id=tokenizer.pad_token_id)


def states_of(model, tokenizer, data):
    """The hidden states of each example, one after the other, by transformers."""
    states = []
    for line in (data / "RTE/dev.tsv").read_text().splitlines()[1:]:
        inputs = tokenizer(*line.split("\t")[1:3], return_tensors="pt")
        if not hasattr(model.config, "type_vocab_size"):
            inputs.pop("token_type_ids")  # GPT-2 would add the embeddings of the words 0 and 1
        with torch.no_grad():
            states.append(model.eval()(**inputs, output_hidden_states=True).hidden_states)
    return states


def naive(path, data, layer, token):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    return np.stack([states[layer][0, token].numpy() for states in states_of(model, tokenizer, data)])


@pytest.fixture
def saved(encoder, tmp_path):
    """Save a model with the encoder's tokenizer."""

    def save(model):
        model.save_pretrained(tmp_path)
        for file in encoder.glob("tokenizer*"):
            shutil.copy(file, tmp_path)
        return tmp_path

    return save


def test_an_encoder_s_features_are_its_layer_s_output_at_the_first_token(encoder, data, saved) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(encoder)
    path, seen = saved(model), []
    for layer in (1, 2):
        found = features_of(path, data, layer)
        np.testing.assert_allclose(found, naive(path, data, layer, 0), atol=1e-5)
    assert tsne.middle_layer(str(path)) == 1
    # And before the residual.
    model.bert.encoder.layer[0].output.dense.register_forward_hook(lambda _m, _i, output: seen.append(output))
    states_of(model, AutoTokenizer.from_pretrained(encoder), data)
    found = features_of(path, data, 1, "ffn_down")
    np.testing.assert_allclose(found, np.stack([output[0, 0].numpy() for output in seen]), atol=1e-5)


def test_a_decoder_s_are_those_at_its_last_token(data, saved) -> None:
    """Of three layers, as the last one's hidden states have the final norm in transformers' list."""
    path = saved(tiny_model("gpt2", head="sequence", n_layer=3, num_labels=2, pad_token_id=0))
    found = features_of(path, data, 2)
    np.testing.assert_allclose(found, naive(path, data, 2, -1), atol=1e-5)


def test_earlier_runs_stand_beside_this_one(evaluate, engine, data, tmp_path, monkeypatch) -> None:
    evaluate("--tasks", "rte", folder="teacher")
    both = ["--tasks", "rte", "--epochs", "1", "--tsne", tmp_path / "teacher"]
    evaluate(*both)
    folder = tmp_path / "out/RTE"
    assert (folder / "tsne.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (folder / "tsne.svg").read_text()
    drawn = json.loads((folder / "tsne.json").read_text())
    assert list(drawn["models"]) == ["teacher", "out"]
    assert drawn["models"]["out"]["path"] == str(folder / "best")
    assert [model["layer"] for model in drawn["models"].values()] == [1, 1]
    assert all(np.array(model["points"]).shape == (41, 2) for model in drawn["models"].values())
    features = naive(folder / "best", data, 1, 0)
    assert drawn["models"]["out"]["silhouette"] == pytest.approx(silhouette_score(features, drawn["targets"]), abs=1e-4)
    task = json.loads((tmp_path / "out/results.json").read_text())["tasks"]["RTE"]
    assert task["tsne"]["file"] == "RTE/tsne.png"
    assert "![t-SNE of RTE](RTE/tsne.png)" in (tmp_path / "out/report.md").read_text()
    # What is drawn already is not drawn again, unless something else is asked for.
    with monkeypatch.context() as patched:
        patched.setattr(tsne, "embed", lambda features: pytest.fail("drawn again"))
        evaluate(*both)
    evaluate(*both, "--kroneckerbert.ffn_output", "projection", "--tsne_layer", "2")
    again = json.loads((folder / "tsne.json").read_text())["models"]
    assert [model["layer"] for model in again.values()] == [2, 2]
    assert engine.built == 2
    # Mistakes are found before anything is trained.
    _, said = evaluate("--tasks", "cola", "--tsne", tmp_path / "teacher", folder="no", code=2)
    assert f"--tsne {tmp_path / 'teacher'}: it holds no model for CoLA" in said
    _, said = evaluate(*both, "--tsne_layer", "3", folder="no", code=2)
    assert "--tsne_layer 3: " in said
    assert "has 2 layers; give 1 to 2" in said
    assert "--tsne_layer is 0: give 1 or more" in evaluate(*both, "--tsne_layer", "0", folder="no", code=2)[1]
    assert engine.built == 2


def test_names_are_as_short_as_they_can_be() -> None:
    for paths, names in (
        (["runs/glue/teacher", "runs/glue/student"], ["teacher", "student"]),
        (["x/one/run", "x/two/run", "x/two"], ["one/run", "two/run", "x/two"]),
        (["same", "same"], ["same", "same"]),
    ):
        assert short_names(paths) == names
