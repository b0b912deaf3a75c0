"""What a student learns from each token: its divergence from the teacher after so many of them, arm after arm.

    python scripts/bench/bench_tokens.py --teacher MODEL --valid held_out.jsonl --text wikitext2/test.txt \\
        --arms arms.jsonl --output results.jsonl

Each line of the arms file is a JSON object with settings of `Arm`, such as

    {"student": "starts/60", "train": "chats.jsonl", "settings": {"kd.ratio": 1}, "tokens": [16384, 32768]}

At each of its `tokens` an arm appends a line to the results: KL(T‖S) on the held-out rows in nats per token, the
perplexity of the first windows of each text, and the time of the training so far: on a CPU that of the processor. The
same command goes on with the first arm that is not at its end, and within it from the step saved last, beside the
results; the arms file may grow meanwhile. Rows are instructions in the teacher's own prompt, or prompt and completion;
all their tokens are learned. On a CPU each is a micro batch, so that nothing is padded; on a GPU all rows of a step are
one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from benching import positive, run
from matplotlib.ticker import FuncFormatter
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel

import llmdistill
from llmdistill.batch import IGNORE_INDEX
from llmdistill.config import TrainConfig
from llmdistill.config.command_line import with_values
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.prompts import resolve_prompt
from llmdistill.data.sources import open_rows, read_examples
from llmdistill.embedded import locate
from llmdistill.files import json_lines
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.panels import plot_panels
from llmdistill.report.plots import curve_of, method_styles, short_number
from llmdistill.runtime.devices import emulates_bf16
from llmdistill.runtime.engine import learning_rate


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A student and its training."""

    student: str
    """A model that exists; the teacher's own name trains a copy of the teacher."""
    train: str
    method: str = "kd"
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the method by dotted key."""
    tokens: list[int] = field(default_factory=lambda: [32768])
    """Tokens after which the student is scored, in rising order; the last number ends the training."""
    step_tokens: int = 2048
    """Tokens of a step, at least: no row is cut."""
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 5
    average: int = 0
    """Tokens of an exponential average of the weights, which is scored too; 0 for none."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the products in training; auto: bf16 on a processor with instructions for it. Weights, optimizer and scores
    are in fp32."""
    seed: int = 0
    """Of the order of the rows."""
    output: str | None = None
    """Folder for the trained student."""
    name: str | None = None
    """Its line in the figure, which several arms may share."""


class Bench:
    """The teacher, and what students are scored on."""

    def __init__(self, options: argparse.Namespace) -> None:
        path = locate(options.teacher)
        self.device = torch.device(options.device)
        self.rows_at_a_time = options.rows_at_a_time or (1 if self.device.type == "cpu" else 64)
        self.teacher, self.tokenizer = load_model(path, dtype=torch.float32, device=self.device), load_tokenizer(path)
        self.held_out = self.rows(options.valid)[: options.rows]
        self.texts = {Path(text).stem: text for text in options.text}
        self.saved = options.output.with_suffix(".pt")
        self.save_seconds = options.save_minutes * 60
        self.windows = {"window": options.window, "limit": options.windows, "batch_size": 1}

    def rows(self, path: str) -> list[Tensor]:
        """The tokens of each row, (T,)."""
        prompt = resolve_prompt(None, [self.tokenizer])
        limits = Limits(max_prompt_length=256, max_length=512, long_prompts="drop", prompt=prompt)
        encoded = encode(read_examples(str(locate(path))), self.tokenizer, limits).items
        return [torch.tensor(row.ids) for row in encoded]

    def micro_batches(self, rows: list[Tensor]) -> list[dict[str, Tensor]]:
        """The rows as micro batches, padded on the right."""
        batches = []
        for start in range(0, len(rows), self.rows_at_a_time):
            part = rows[start : start + self.rows_at_a_time]
            ids, labels = (pad_sequence(part, batch_first=True, padding_value=value) for value in (0, IGNORE_INDEX))
            mask = (labels != IGNORE_INDEX).long()
            batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
            batches.append({name: tensor.to(self.device) for name, tensor in batch.items()})
        return batches

    def clock(self) -> float:
        """Seconds: of this process on the processors, or until the GPU has done what it was given."""
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def steps(self, arm: Arm) -> Iterator[list[Tensor]]:
        """The rows of each step; all are drawn before one is drawn again."""
        rows, left, draw, seen = self.rows(arm.train), list[Tensor](), random.Random(arm.seed), 0
        while seen < arm.tokens[-1]:
            step = list[Tensor]()
            while sum(map(torch.numel, step)) < arm.step_tokens:
                left = left or draw.sample(rows, len(rows))
                step.append(left.pop())
            seen += sum(map(torch.numel, step))
            yield step

    @torch.no_grad()
    def score(self, student: PreTrainedModel) -> dict[str, float]:
        loss = llmdistill.DistillationLoss(self.teacher, student.eval(), "kd", ratio=1.0)
        batches = self.micro_batches(self.held_out)
        counts = loss.counts(batches)
        kl = sum(loss(batch, num_items_in_batch=counts).loss.item() for batch in batches)
        loss.remove()
        scores = (
            llmdistill.evaluate(student, self.texts, tokenizer=self.tokenizer, **self.windows) if self.texts else {}
        )
        return {"kl": kl, **{name: each["perplexity"] for name, each in scores.items()}}

    def run(self, arm: Arm) -> Iterator[dict[str, Any]]:
        """Train the student of an arm, and give its figures where they are wanted."""
        student: PreTrainedModel = load_model(locate(arm.student), dtype=torch.float32, device=self.device)
        keep = get_ema_multi_avg_fn(math.exp(-arm.step_tokens / arm.average)) if arm.average else None
        average = None if keep is None else AveragedModel(student, multi_avg_fn=keep)
        optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.0, fused=True)
        steps, left, seen, seconds, loss = list(self.steps(arm)), arm.tokens, 0, 0.0, None
        rates = {key: getattr(arm, key) for key in ("learning_rate", "schedule", "warmup_steps")}
        is_slow = self.device.type == "cpu" and emulates_bf16()
        in_bf16 = arm.dtype == "bf16" or (arm.dtype == "auto" and not is_slow)
        config = TrainConfig(steps=max(1, len(steps)), **rates)
        trained: dict[str, Any] = {"student": student, "optimizer": optimizer}
        trained |= {} if average is None else {"average": average}
        done, saved_at = -1, time.monotonic()
        if self.saved.exists() and read_arm((saved := torch.load(self.saved, map_location=self.device))["arm"]) == arm:
            done, seen, seconds = saved["done"], saved["seen"], saved["seconds"]
            left = [tokens for tokens in left if tokens > seen]
            for name, part in trained.items():
                part.load_state_dict(saved[name])
        for number, step in enumerate([[], *steps]):  # before the first step the student is as it was
            if number <= done:
                continue
            began = self.clock()
            if step:
                loss = loss or llmdistill.DistillationLoss(self.teacher, student, arm.method, settings=arm.settings)
                student.train()
                batches = self.micro_batches(step)
                counts = loss.counts(batches)
                for batch in batches:
                    with torch.autocast(self.device.type, torch.bfloat16, enabled=in_bf16):
                        output = loss(batch, num_items_in_batch=counts)
                    output.backward()
                clip_grad_norm_(student.parameters(), 1.0)
                optimizer.param_groups[0]["lr"] = learning_rate(config, number - 1)
                optimizer.step()
                optimizer.zero_grad()
                if average is not None:
                    average.update_parameters(student)
            seen, seconds = seen + sum(map(torch.numel, step)), seconds + self.clock() - began
            if seen >= left[0]:
                if loss is not None:
                    loss.remove()  # the scores have a loss of their own
                left, loss = [tokens for tokens in left if tokens > seen], None
                averaged = {} if average is None else {"averaged": self.score(average.module)}  # type: ignore[arg-type]
                if arm.output is not None and not left:
                    student.save_pretrained(arm.output)
                    self.tokenizer.save_pretrained(arm.output)
                yield {"seen": seen, "seconds": round(seconds, 1), **self.score(student), **averaged}
            if time.monotonic() - saved_at > self.save_seconds:
                states = {name: part.state_dict() for name, part in trained.items()}
                written = self.saved.with_suffix(".part")
                torch.save({"arm": asdict(arm), "done": number, "seen": seen, "seconds": seconds, **states}, written)
                written.replace(self.saved)
                saved_at = time.monotonic()


def next_arm(arms: Path, results: Path) -> Arm | None:
    """The first arm of the file, as it is now, whose results do not reach its end."""
    found = json_lines(results) if results.exists() else []
    done = [read_arm(each["arm"]) for each in found if each["seen"] >= each["arm"]["tokens"][-1]]
    listed = (read_arm(values, where) for values, where in open_rows(arms))
    return next((arm for arm in listed if arm not in done), None)


def read_arm(values: dict[str, Any], where: str = "") -> Arm:
    return with_values(Arm(student="", train=""), values, key=where)


def draw(results: Path, file: Path) -> None:
    """Draw the figures of all arms against the tokens that they have learned from."""
    panels: dict[str, dict[str, dict[float, list[float]]]] = {}
    for line in json_lines(results):
        name = line["arm"].get("name") or Path(line["arm"]["student"]).name
        for figure in [each for each in line if each not in ("arm", "seen", "seconds", "averaged")]:
            title = "nats per token from the teacher" if figure == "kl" else f"perplexity of {figure}"
            panels.setdefault(title, {}).setdefault(name, {}).setdefault(line["seen"], []).append(line[figure])
    styles = method_styles(list(dict.fromkeys(name for lines in panels.values() for name in lines)))
    curves = {
        title: [(name, styles[name], curve_of(values)) for name, values in lines.items()]
        for title, lines in panels.items()
    }
    figure = plot_panels(curves, "tokens", scores=True)
    for axes in figure.axes:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_number(tokens)))
    figure.savefig(file, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="a decoder")
    parser.add_argument("--valid", required=True, help="held-out rows")
    parser.add_argument("--rows", type=positive, default=32, help="held-out rows that are scored, the first ones")
    parser.add_argument("--text", action="append", default=[], help="a text whose perplexity is measured")
    parser.add_argument("--window", type=positive, default=1024, help="tokens of a window of a text")
    parser.add_argument("--windows", type=positive, default=4, help="windows of a text, the first ones")
    parser.add_argument("--arms", type=Path, required=True, help="JSONL: the settings of each arm")
    parser.add_argument("--output", type=Path, required=True, help="JSONL: the figures of each arm")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--rows_at_a_time", type=positive, help="rows of a micro batch: 1 on a CPU, 64 on a GPU")
    parser.add_argument("--save_minutes", type=float, default=20, help="how often a training is saved")
    parser.add_argument("--figure", type=Path, help="PNG of the results against tokens")
    options = parser.parse_args()
    next_arm(options.arms, options.output)  # says what is wrong with the arms before the teacher is loaded
    bench = Bench(options)
    while (arm := next_arm(options.arms, options.output)) is not None:
        for figures in bench.run(arm):
            line = json.dumps({"arm": asdict(arm), **figures})
            print(line, flush=True)
            with options.output.open("a") as file:
                file.write(line + "\n")
    if options.figure is not None:
        draw(options.output, options.figure)


if __name__ == "__main__":
    run(main)
