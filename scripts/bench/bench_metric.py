"""MaKD in the metric of a weighted start, beside MaKD and KD: perplexity after a few steps from the same student.

    python scripts/bench/bench_metric.py --teacher DIR --student DIR --train valid.txt --test test.txt --output metric

A weighted start knows what an error δ of an output costs: ½ δᵀGδ nats, G the second moments of the loss's gradients at
that output. The row `metric` has this in place of the squared errors of queries, keys, values, gate and up
projections; hidden states and down projections keep their relative errors. G is measured once, on labels that are
drawn from the teacher, and kept in the output folder. The command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import llmdistill
from llmdistill.batch import IGNORE_INDEX, LossSum, Taps
from llmdistill.data.whole_text import TextSet
from llmdistill.losses.terms import LayerTerm, Tap
from llmdistill.methods import METHODS, Method, MethodEntry
from llmdistill.methods.makd import MakdConfig, build_makd
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.progress import progress

ASPECTS = ("query", "key", "value", "ffn_up", "ffn_gate")
"""The terms that get the metric."""

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "kd": ("kd", {"ratio": 1.0}),
    "makd, logits 10": ("makd", {"logits": 10.0}),
    "makd, metric, weights 30 and 10": (
        "metric",
        {
            f"metric.{name}": weight
            for name, weight in {**dict.fromkeys(ASPECTS, 30.0), "ffn_down": 10.0, "hidden": 10.0}.items()
        },
    ),
}

Moments = dict[Tap, Tensor]


def features(tensor: Tensor) -> Tensor:
    """(B, H, T, D) or (B, T, F) as (B, T, features), in fp32."""
    return (tensor.transpose(1, 2).flatten(2) if tensor.dim() == 4 else tensor).float()


def measure(teacher_folder: str, text: str, *, texts: int, tokens: int, method: Method) -> Moments:
    """G of every tap that the terms in ASPECTS compare: mean over tokens of ggᵀ, g the gradient of the summed loss."""
    found: Moments = {}
    count = 0

    def watching(term: LayerTerm) -> LayerTerm:
        ((aspect, layer),) = term.student

        def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
            tap = getattr(student, aspect)[layer]

            def add(gradient: Tensor) -> None:
                rows = features(gradient).flatten(0, 1)
                found[aspect, layer] = found.get((aspect, layer), 0) + rows.T @ rows

            tap.register_hook(add)
            return LossSum((tap * 0).sum().float(), mask.sum())

        return replace(term, loss=loss)

    watched = [watching(term) for term in method.layer_terms if term.name in ASPECTS]
    names = {term.name for term in watched}
    watch = Method(weights=dict.fromkeys(names, 1.0), layer_terms=watched, shift=True)
    METHODS["watch"] = MethodEntry(label="watch", help="", settings=MakdConfig, build=lambda *_: watch)
    teacher, copy = (load_model(Path(teacher_folder), dtype=torch.float32) for _ in range(2))
    loss = llmdistill.DistillationLoss(teacher, copy, method="sft", also=["watch"])
    ids = load_tokenizer(Path(teacher_folder))(text, return_tensors="pt").input_ids[0]
    pieces = ids[: texts * tokens].reshape(-1, 1, tokens)
    generator = torch.Generator().manual_seed(0)
    for piece in progress(pieces, "Second moments of the gradients", "texts"):
        with torch.no_grad():
            drawn = torch.multinomial(teacher(piece).logits[0].softmax(-1), 1, generator=generator)[:, 0]
        labels = torch.cat([torch.tensor([IGNORE_INDEX]), drawn[:-1]])[None]
        result = loss({"input_ids": piece, "attention_mask": torch.ones_like(piece), "labels": labels})
        (result.loss * (tokens - 1)).backward()
        copy.zero_grad(set_to_none=True)
        count += tokens
    loss.remove()
    del METHODS["watch"]
    return {tap: total / count for tap, total in found.items()}


def build_metric(moments: Moments) -> MethodEntry:
    """MaKD whose terms in ASPECTS are ½ δᵀGδ, in nats per token."""

    def in_nats(term: LayerTerm) -> LayerTerm:
        ((aspect, layer),), ((_, taught),) = term.student, term.teacher
        metric = moments[aspect, layer]

        def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
            error = features(getattr(student, aspect)[layer]) - features(getattr(teacher, aspect)[taught])
            return LossSum((((error @ metric) * error).sum(-1) * (mask != 0)).sum() / 2, (mask != 0).sum())

        return replace(term, loss=loss)

    def build(*given: Any) -> Method:
        method = build_makd(*given)
        terms = [in_nats(term) if term.name in ASPECTS else term for term in method.layer_terms]
        return replace(method, layer_terms=terms)

    return MethodEntry(
        label="MaKD in the metric of the start", help="", settings=MakdConfig, build=build, uses_output=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("teacher", "student", "train", "test", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--texts", type=int, default=32, help="texts of 256 tokens on which G is measured")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=8, help="texts of 256 tokens in a step")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--only", action="append", choices=ROWS)
    options = parser.parse_args()
    output, train = Path(options.output), TextSet(options.train).read()
    output.mkdir(parents=True, exist_ok=True)
    tokenizer, kept = load_tokenizer(Path(options.teacher)), output / "moments.pt"
    if not kept.is_file():
        shapes = load_model(Path(options.teacher), dtype=torch.float32).config
        method = build_makd(MakdConfig(), shapes, shapes)
        torch.save(measure(options.teacher, train, texts=options.texts, tokens=256, method=method), kept)
    METHODS["metric"] = build_metric(torch.load(kept, weights_only=True))
    for seed in range(options.seeds):
        for label in options.only or ROWS:
            method_name, settings = ROWS[label]
            folder = output / f"{method_name}-{seed}"
            run = llmdistill.distill(
                options.teacher,
                options.student,
                options.train,
                method_name,
                kind="text",
                output_dir=folder,
                settings={"data.max_length": 256, "train.dtype": options.dtype, "train.log_every": 5, "seed": seed},
                steps=options.steps,
                global_batch_size=options.batch,
                micro_batch_size=4,
                warmup_steps=5,
                learning_rate=options.learning_rate,
                save_every=None,
                **settings,
            )
            student = load_model(run.folder / "student", dtype=torch.float32)
            score = llmdistill.evaluate(student, options.test, kind="text", tokenizer=tokenizer, window=1024, limit=8)
            print(json.dumps({"row": label, "seed": seed, "perplexity": score["perplexity"]}), flush=True)


if __name__ == "__main__":
    main()
