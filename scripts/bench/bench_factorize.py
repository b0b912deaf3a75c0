"""Setting up: truncated SVD against torch.linalg.svd, and a whole model.

    python scripts/bench/bench_factorize.py           # 2048×8192 at rank 600 and its neighbors, minutes
    python scripts/bench/bench_factorize.py --full    # and all 16 layers of Llama-3.2-1B's shapes, many more minutes
    python scripts/bench/bench_factorize.py --quick   # smaller ones, under a minute

Matrices are fp32, and only their decompositions take turns in processes of their own. The model has random bf16 weights
and is factorized from a folder into a folder; what the rank would enlarge stays dense. Loading is from_pretrained of
files that the system has just seen.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any

import torch
from benching import Line, Settings, Table, Work, bench_parser, in_seconds, measure, parse, run, time_ratio
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from llmdistill.config import FactorizeConfig, StudentConfig
from llmdistill.runtime.terminal import quiet_libraries
from llmdistill.students.convert import compress_folder
from llmdistill.students.counting import build_reference, layer_linears
from llmdistill.students.svd import truncated_svd

LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
"""Llama-3.2-1B's config."""
TWO_LAYERS = {**LLAMA, "num_hidden_layers": 2, "vocab_size": 16384}
SMALL = {**TWO_LAYERS, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}


def full_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The reference: all singular values and vectors, then the first k."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank], s[:rank], vh[:rank]


def make_matrix(n: int, m: int, spectrum: str, device: torch.device) -> Tensor:
    """An fp32 matrix: "flat" is Gaussian noise, the hard case; "decaying" has σᵢ ~ 1/i, as trained weights do."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(n, m, generator=generator) / m**0.5
    if spectrum == "decaying":
        basis = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
        matrix = basis @ (matrix / torch.arange(1, n + 1)[:, None])
    return matrix.to(device)


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One decomposition, ours or the full one; and how far from the matrix it is, as a Frobenius norm in fp64."""
    matrix = make_matrix(row["n"], row["m"], row["spectrum"], device)
    function = truncated_svd if row["way"] == "ours" else full_svd
    u, s, vh = (factor.double() for factor in function(matrix, row["rank"]))
    missed = torch.linalg.norm(matrix.double() - (u * s) @ vh).item()
    return Work(lambda: function(matrix, row["rank"])[1].shape, {"error": missed})


def bench_svd(settings: Settings, table: Table) -> None:
    n, m, rank = (768, 3072, 256) if settings.quick else (2048, 8192, 600)
    for rows, columns, spectrum in [(n, m, "flat"), (n, m, "decaying"), (m, n, "flat")][: 1 if settings.quick else 3]:
        row = {"n": rows, "m": columns, "rank": rank, "spectrum": spectrum}
        found = measure(build, {way: {**row, "way": way} for way in ("ours", "full")}, settings, memory=False)
        ours, full = found["ours"], found["full"]
        excess = ours.facts["error"] / full.facts["error"] - 1
        detail = f"{in_seconds(ours, full)}, error over the optimum's - 1: {excess:.1e}"
        name = f"SVD {rows}x{columns} {spectrum}, rank {rank}: speed-up"
        table.add(Line(name, time_ratio(full, ours), None, detail))


def bench_set_up(settings: Settings, table: Table, *, full: bool) -> None:
    config = LlamaConfig(**(LLAMA if full else SMALL if settings.quick else TWO_LAYERS))
    rank = 64 if settings.quick and not full else 606
    # Keys and values are narrower than the rank, which `rank` alone would refuse.
    linears = layer_linears(build_reference(config))
    ranks = {name: rank for name, (m, n) in linears.items() if rank * (n + m) < n * m}
    with tempfile.TemporaryDirectory() as folder:
        dense, student = Path(folder) / "dense", Path(folder) / "student"
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(dense)
        made_by = StudentConfig(factorize=FactorizeConfig(ranks=ranks))
        made = partial(compress_folder, dense, student, made_by, device=torch.device(settings.device))
        (took,) = repeat(made, number=1, repeat=1)
        load = [
            median(repeat(partial(LlamaForCausalLM.from_pretrained, path), number=1, repeat=3))
            for path in (student, dense)
        ]
    name = f"{config.num_hidden_layers} Llama layers {config.hidden_size} wide, rank {rank}"
    table.add(Line(f"{name}: compress", took, None, f"{len(ranks)} matrices", unit=" s"))
    table.add(Line(f"{name}: load student / dense", load[0] / load[1], None, f"{load[0]:.3f} s / {load[1]:.3f} s"))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="all 16 layers and 128,256 words of Llama-3.2-1B's shapes")
    settings, table, arguments = parse(parser)
    quiet_libraries()
    torch.set_num_threads(settings.threads)
    bench_svd(settings, table)
    bench_set_up(settings, table, full=arguments.full)
    table.finish()


if __name__ == "__main__":
    run(main)
