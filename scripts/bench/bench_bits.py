"""Quality against bytes: perplexity and ROUGE-L of a teacher and its students over the size of their weights on disk.

    python scripts/bench/bench_bits.py --teacher DIR --text test.txt --prompts prompts.jsonl --figure bits.png \\
        --student dense=dense8 --student dense=dense4 --student "60 %=student" --student "60 %=student8"

Students with the same label are a line of the figure. Perplexity is that of the text's first 8 windows,
ROUGE-L that of greedy answers to the first 20 prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benching import run

import llmdistill
from llmdistill.embedded import locate
from llmdistill.report.panels import plot_size
from llmdistill.report.plots import method_styles
from llmdistill.report.score import PERPLEXITY

ANSWERS = {"decoding": "greedy", "limit": 20, "max_prompt_length": 128, "max_length": 192, "long_prompts": "drop"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of a decoder")
    parser.add_argument("--student", action="append", default=[], metavar="LABEL=DIR", help="may be repeated")
    parser.add_argument("--text", required=True, help="a text, whose perplexity is the figure")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window of the text")
    parser.add_argument("--prompts", help="a file of instructions, for ROUGE-L")
    parser.add_argument("--figure", type=Path, help="PNG of perplexity against bytes")
    options = parser.parse_args()
    lines: dict[str, list[tuple[int, float]]] = {}
    print("| model | MB | perplexity | ROUGE-L |\n|---|---:|---:|---:|")
    for label, folder in [("teacher", str(locate(options.teacher))), *(each.split("=", 1) for each in options.student)]:
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        scored = llmdistill.evaluate(folder, options.text, window=options.window, limit=8)["perplexity"]
        answers = options.prompts and llmdistill.evaluate(folder, options.prompts, **ANSWERS)["rougeL"]
        rouge = f"{answers:.1f}" if answers is not None else ""
        print(f"| {label}: {Path(folder).name} | {size / 1e6:.1f} | {scored:,.4g} | {rouge} |", flush=True)
        lines.setdefault(label, []).append((size, scored))
    if options.figure is not None:
        ((_, teacher),) = lines.pop("teacher")
        styles, name = method_styles(list(lines)), Path(options.text).stem
        points = [(label, styles[label], sorted(each)) for label, each in lines.items()]
        plot_size(points, teacher, PERPLEXITY, [name], "bytes on disk").savefig(options.figure, dpi=160)


if __name__ == "__main__":
    run(main)
