"""The first matrix between embeddings of two widths, against the orthogonal Procrustes problem of SciPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from sentence_encoders import encoder
from transformers import BertConfig, BertModel

from llmdistill.data.pairs import PairExample, collate_pairs, encode_pairs
from llmdistill.methods import METHODS
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective, Pooling
from llmdistill.run import rotation
from llmdistill.run.wiring import tapped
from llmdistill.runtime.distributed import World

TEXTS = [f"{one} {other} {third}" for one in "abc" for other in "cdef" for third in "afb"]


@pytest.mark.parametrize("most", [100, 12])
def test_the_matrix_is_that_of_the_procrustes_problem(tmp_path, monkeypatch, most):
    monkeypatch.setattr(rotation, "_SENTENCES", most)
    monkeypatch.setattr(rotation, "_BATCH_SIZE", 5)
    teacher = encoder(tmp_path)
    torch.manual_seed(1)
    student = BertModel(BertConfig(**{**teacher.config.to_dict(), "hidden_size": 8})).eval()
    for model in (teacher, student):  # or else all embeddings are of one length
        torch.nn.init.normal_(model.encoder.layer[-1].output.LayerNorm.weight)
    tokenizer = load_tokenizer(tmp_path)
    items = encode_pairs([PairExample(text, None, 0, place) for place, text in enumerate(TEXTS)], tokenizer, 5)
    pooling = Pooling(("cls",))
    objective = Objective(tokens=False, sequences="embeddings", pooling=pooling)
    method = METHODS["embedding"].build(METHODS["embedding"].defaults(), teacher.config, student.config, objective)
    found = rotation.nearest_rotation(
        method,
        lambda: student,
        tapped(method, "teacher", teacher),
        (items, partial(collate_pairs, pad_token_id=0)),
        World.alone(),
    )
    chosen, rows = TEXTS if most == 100 else TEXTS[::3], []
    for model in (student, teacher):
        with torch.no_grad():
            ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in chosen]
            first = np.stack([model(each).last_hidden_state[0, 0].double().numpy() for each in ids])
        rows.append(first / np.linalg.norm(first, axis=1, keepdims=True))
    ours, theirs = np.pad(rows[0], ((0, 0), (0, 8))), rows[1]
    expected = orthogonal_procrustes(ours, theirs)[0][:8].T
    assert found.shape == (16, 8)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
