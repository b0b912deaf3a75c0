"""Compare the package's truncated SVD with torch.linalg.svd: seconds and approximation error, in one run.

    python scripts/bench_factorize.py           # 2048×8192 at rank 600 and its neighbours, minutes
    python scripts/bench_factorize.py --quick   # a smaller matrix, seconds

The last line is JSON with the figures of the first row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from llmdistill.factorize.svd import truncated_svd

Factors = tuple[Tensor, Tensor, Tensor]


def full_svd(matrix: Tensor, rank: int) -> Factors:
    """The reference: all singular values and vectors, then the first k."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank], s[:rank], vh[:rank]


def make_matrix(n: int, m: int, spectrum: str, device: str) -> Tensor:
    """An fp32 matrix: "flat" is Gaussian noise, the hard case; "decaying" has σᵢ ~ 1/i, as trained weights do."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(n, m, generator=generator) / m**0.5
    if spectrum == "decaying":
        basis = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
        matrix = basis @ (matrix / torch.arange(1, n + 1)[:, None])
    return matrix.to(device)


def timed(function: Callable[[Tensor, int], Factors], matrix: Tensor, rank: int) -> tuple[float, Factors]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    result = function(matrix, rank)
    if matrix.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def error(matrix: Tensor, factors: Factors) -> float:
    """Frobenius norm of what the approximation misses, in fp64."""
    u, s, vh = (factor.double() for factor in factors)
    return torch.linalg.norm(matrix.double() - (u * s) @ vh).item()


def bench(n: int, m: int, rank: int, spectrum: str, device: str) -> dict[str, float | int | str]:
    """One row: seconds of both, their ratio, and ours error over the optimum's, minus 1."""
    matrix = make_matrix(n, m, spectrum, device)
    truncated_svd(matrix[:, :n].contiguous(), 1)  # threads and libraries are up before the clock runs
    seconds, ours = timed(truncated_svd, matrix, rank)
    seconds_full, full = timed(full_svd, matrix, rank)
    return {
        "matrix": f"{n}x{m}",
        "spectrum": spectrum,
        "rank": rank,
        "seconds": round(seconds, 3),
        "seconds_full_svd": round(seconds_full, 3),
        "speedup": round(seconds_full / seconds, 2),
        "relative_error_over_optimum": error(matrix, ours) / error(matrix, full) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a 768×3072 matrix at rank 256")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    n, m, rank = (768, 3072, 256) if args.quick else (2048, 8192, 600)
    cases = [(n, m, "flat"), (n, m, "decaying"), (m, n, "flat")]
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, fp32, rank {rank}")
    print(f"{'matrix':>12} {'spectrum':>9} {'ours s':>8} {'full SVD s':>11} {'speed-up':>9} {'error/optimum - 1':>18}")
    rows = []
    for case in cases:
        row = bench(*case[:2], rank, case[2], args.device)
        print(
            f"{row['matrix']:>12} {row['spectrum']:>9} {row['seconds']:8} {row['seconds_full_svd']:11} "
            f"{row['speedup']:>8}× {row['relative_error_over_optimum']:18.1e}",
            flush=True,
        )
        rows.append(row)
    print(json.dumps({"threads": torch.get_num_threads(), **rows[0]}))


if __name__ == "__main__":
    main()
