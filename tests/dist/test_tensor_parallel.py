"""A teacher by tensor parallelism gives the outputs of the whole teacher, and a run with it learns the same.

The file is also the program of a rank. Four ranks on two nodes: the ranks take the names of their hosts from their
number.
"""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from tiny import SETTINGS, WORDS, tiny_config, tiny_model

from llmdistill.batch import IGNORE_INDEX, Batch, HeadInputs, TeacherRows
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.losses.divergence import DIVERGENCES
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import TokenTerm
from llmdistill.methods.kd import KdConfig
from llmdistill.models.load import load_model
from llmdistill.runtime.distributed import init_distributed
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder
from llmdistill.teachers.tensor_parallel import CutSizes, TensorParallelTeacher, load_tensor_parallel, read_plan

ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "granite", "cohere", "starcoder2", "phi"),
    *("gpt_neox", "helium"),
)
"""Grouped queries, biases of both kinds of cuts and of the LM head, norms of heads, sliding windows, logits that are
scaled or capped, embeddings that are scaled or tied; the last has no entry in `families`, and its LM head whole."""
PLACES = ("labels", "tokens")
UNEVEN = {"qwen3": 61, "gemma3_text": 63}
"""Vocabularies that two ranks cannot share evenly."""
CHANGES = {"gemma3_text": {"final_logit_softcapping": 5.0}, "helium": {"head_dim": 4}}
TERMS = [
    TokenTerm("label", None),
    *(TokenTerm(name, entry.build(KdConfig(divergence=name)), 2.0, 4.0) for name, entry in DIVERGENCES.items()),
]


def batches(rank: int) -> list[Batch]:
    """Batches of this rank, of other sizes and lengths than those of the others: padded either way, packed, whole."""
    generator = torch.Generator().manual_seed(rank)
    size, length = 1 + rank % 2, 6 + rank
    ids = torch.randint(3, 60, (size, length), generator=generator)
    whole = torch.ones_like(ids)
    right, left = whole.clone(), whole.clone()
    right[0, length - 1 - rank :] = 0
    left[0, : 1 + rank] = 0
    packed, positions = whole.clone(), torch.arange(length).expand(size, -1).clone()
    packed[:, 3:], positions[:, 3:] = 2, positions[:, 3:] - 3
    unlearned = ids if rank % 2 else torch.full_like(ids, IGNORE_INDEX)  # the first rank of a node has no label at all
    made = [Batch(ids, mask, ids.masked_fill(mask == 0, IGNORE_INDEX)) for mask in (whole, right, left)]
    return [*made, Batch(ids, whole, unlearned), Batch(ids, packed, ids, position_ids=positions)]


def losses(teacher: TeacherRows, labels: torch.Tensor, chunk: int, vocabulary: int | None) -> list[torch.Tensor]:
    """The sums of all terms beside a random student, and the gradients of its rows, weight and bias."""
    generator = torch.Generator().manual_seed(7)
    shapes = (len(labels), 5), (vocabulary or WORDS, 5), (vocabulary or WORDS,)
    student = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    factors = torch.linspace(0.5, 1.5, len(TERMS), dtype=torch.float64)
    found = token_losses(HeadInputs(*student), teacher, labels, TERMS, factors, vocabulary=vocabulary, chunk=chunk)
    found.total.backward()
    return [found.sums, *(tensor.grad for tensor in student)]


def main():
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[-1])
    socket.gethostname = lambda: f"host{rank // 2}"
    init_distributed()
    summed, sent = list[int](), list[int]()
    all_reduce, all_to_all = torch.distributed.all_reduce, torch.distributed.all_to_all_single

    def counted(tensor, **more):
        summed.append(tensor.nbytes)
        return all_reduce(tensor, **more)

    def exchange(received, tensor, of_ranks, to_ranks, **more):
        sent.append(tensor.element_size() * to_ranks[1 - rank % 2])
        return all_to_all(received, tensor, of_ranks, to_ranks, **more)

    torch.distributed.all_reduce, torch.distributed.all_to_all_single = counted, exchange
    for name in ARCHITECTURES:
        whole = load_model(folder / name, dtype=torch.float64)
        cut = load_tensor_parallel(str(folder / name), dtype=torch.float64, head="lm_head")
        layers = [sum(each.numel() for each in model.base_model.layers.parameters()) for model in (cut, whole)]
        assert 0.5 <= layers[0] / layers[1] < 0.6, (name, layers)  # all but norms, and biases of added outputs
        sizes, held = CutSizes.of(whole, 2), [sum(each.nbytes for each in model.parameters()) for model in (cut, whole)]
        row_bytes = 8 * 16 if name in UNEVEN else 0
        assert abs(held[0] - (held[1] - sizes.cut_bytes / 2)) <= row_bytes, f"{name}: the forecast of llmdistill plan"
        expected, tapped = (TappedModel(model, Recorder(model, {})) for model in (whole, cut))
        teacher = TensorParallelTeacher(tapped)
        for number, batch in enumerate(batches(rank)):
            if expected.makes_mask and batch.position_ids is not None:
                continue  # its own masks know no packed rows
            summed.clear()
            with torch.no_grad():
                own, outputs = (each.compute_targets(batch, lm_head=PLACES) for each in (teacher, expected))
            tokens = 3 * (6 + (rank | 1))  # of the rows of both ranks of the node
            assert sum(summed) == sizes.summed_bytes * tokens, f"{name}: the forecast of llmdistill plan"
            for place in PLACES:
                rows, shared = outputs.lm_head[place], own.lm_head[place]
                labels = batch.input_ids.flatten()[: len(rows.rows)] % 41  # any will do
                assert isinstance(shared, HeadInputs) == (name == "helium")
                if isinstance(shared, HeadInputs):
                    torch.testing.assert_close(shared.rows, rows.rows)
                    continue
                # Many chunks, and a vocabulary without its padding, are for any model the same.
                for chunk, vocabulary in ((3, None), (256, 41)) if name in ("llama", *UNEVEN) else ((8, None),):
                    sent.clear()
                    pair = [losses(each, labels, chunk, vocabulary or UNEVEN.get(name)) for each in (shared, rows)]
                    torch.testing.assert_close(*pair, msg=lambda text: f"{name} {number} {place}: {text}")  # noqa: B023
                    if vocabulary is None and name not in UNEVEN:
                        most = len(shared.rows[1 - rank % 2])
                        assert sum(sent) == sizes.logit_bytes / 2 * most, f"{name}: the forecast of llmdistill plan"
    torch.distributed.barrier()


def test_the_outputs_are_those_of_the_whole_teacher(launch, tmp_path, monkeypatch):
    for name in ARCHITECTURES:
        monkeypatch.setitem(SETTINGS, name, SETTINGS.get(name, SETTINGS["llama"]))  # of the test alone
        vocabulary = UNEVEN.get(name, WORDS)
        model = tiny_model(name, scale=3.0, vocab_size=vocabulary, **CHANGES.get(name, {}))
        with torch.no_grad():  # biases begin as zeros, which would hide one that is added twice
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(tmp_path / name)
    launch(str(tmp_path), ranks=4, program=__file__)


def test_a_run_learns_what_it_learns_beside_a_whole_teacher(trained, tmp_path):
    """Two ranks whose micro batches have other lengths, within a student that ZeRO-3 shards; the validation too."""
    valid = tmp_path / "valid.jsonl"  # of few rows: a CPU takes long for the teacher's many small operations
    valid.write_text("".join(locate("embedded:valid").read_text().splitlines(keepends=True)[:10]))
    kd = ("--method", "kd", "--data.valid", str(valid), "--train.steps", "3", "--train.validate_every", "3")
    plain, cut = trained(*kd, ranks=2), trained(*kd, "--teacher.sharding", "tensor", ranks=2, ds_config="zero3")
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (plain, cut)]
    assert len(rows[0]) == len(rows[1]) >= 3
    for one, other in zip(*rows, strict=True):
        keys = one.keys() & {"loss", "forward_kl", "valid_loss"}
        assert {key: other[key] for key in keys} == pytest.approx({key: one[key] for key in keys}, rel=1e-4)
    assert "valid_loss" in rows[0][0].keys() | rows[0][-1].keys()


def test_a_teacher_that_cannot_be_cut_is_refused_in_one_sentence():
    with pytest.raises(UserError, match=r"num_key_value_heads is 2, which the 4 ranks of a node do not divide"):
        read_plan(tiny_config("llama"), 4)
    with pytest.raises(UserError, match=r"no plan that cuts the layers of gpt2: take teacher\.sharding node or zero3"):
        read_plan(tiny_config("gpt2"), 2)
    with pytest.raises(UserError, match="of olmo2 as colwise"):
        read_plan(tiny_config("olmo2"), 2)
    with pytest.raises(UserError, match="has factors or few bits, which cannot be cut"):
        read_plan(tiny_config("llama", quantization_config={"quant_method": "llmdistill"}), 2)


if __name__ == "__main__":
    main()
