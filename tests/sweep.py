"""Runs every decoder and encoder of transformers through the whole job: `python tests/sweep.py` says what became of it.

    python tests/sweep.py --results results.jsonl            # all types that have no line in the file yet
    python tests/sweep.py --results results.jsonl mamba2 xlm  # these alone, again
    python tests/sweep.py --results results.jsonl --write     # the table of docs/students.md

Each type runs in a process of its own and takes some seconds. A step is right, or refused by a UserError, or wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from shrunk import VOCABULARY, has_encoder, model_types, of_text_alone, shrunk_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

import llmdistill
from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, is_causal, shape_of
from llmdistill.models.load import load_model
from llmdistill.students.counting import build_reference, count_parameters, layer_linears, layer_stacks
from llmdistill.students.install import can_factorize_embedding, is_factorized, token_embedding

STEPS = ("svd", "full rank", "gradients", "loss", "kd", "makd", "export")
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
_WORDS = [f"w{number}" for number in range(VOCABULARY - len(_SPECIAL))]
PAGE = Path(__file__).resolve().parent.parent / "docs/students.md"
MARKS = ("<!-- from tests/sweep.py -->", "<!-- end of the sweep -->")
_REFUSED = {"makd": "MaKD", "gradients": "a weighting by gradients"}
_BEST = "all works"
_TIMEOUT = 240
_MEMORY = 5 << 30
_IDS = torch.randint(5, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
_MASK = torch.ones_like(_IDS)
_MASK[1, 9:] = 0


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of whole words, one a row of the embeddings."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*_SPECIAL, *_WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad", "bos", "eos", "unk", "mask"), _SPECIAL, strict=True))
    tokens = {f"{name}_token": token for name, token in names.items()} | {"cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **tokens).save_pretrained(folder)


def rows(causal: bool) -> list[Any]:
    """Training data: instructions for a decoder, texts for an encoder."""
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> str:
        return " ".join(_WORDS[n] for n in torch.randint(len(_WORDS), (length,), generator=generator).tolist())

    if causal:
        return [{"instruction": text(3 + n % 4), "output": text(4 + n % 5)} for n in range(8)]
    return [text(14 + n % 5) for n in range(16)]


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """The logits of a padded batch where it is not padding."""
    logits = model.eval()(input_ids=_IDS, attention_mask=_MASK).logits.float()
    return logits[:, : _IDS.shape[1]][_MASK.bool()]


def check_equal(logits: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Raise an AssertionError if logits differ by more than a share of the largest."""
    difference = (logits - expected).abs().max().item()
    assert difference <= tolerance * max(1.0, expected.abs().max().item()), f"{what}: logits differ by {difference:.2g}"


class Job:
    """The whole job of one type; each step leaves its folder for the next."""

    def __init__(self, name: str, base: Path) -> None:
        self.name, self.base = name, base
        self.auto = model_types()[name]
        self.teacher = base / "teacher"
        self.student = base / "svd"
        self.model: Any = None

    def stock(self) -> str | None:
        """Save the teacher; returns what is wrong with it in transformers alone."""
        try:
            model = shrunk_model(self.name)
            model.save_pretrained(self.teacher)
            expected = logits_of(model)
            check_equal(logits_of(self.auto.from_pretrained(self.teacher)), expected, "saved and loaded")
            self.model = model
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            save_tokenizer(self.teacher)
        return None

    def pair(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The teacher and the student."""
        teacher, student = (load_model(path, dtype=torch.float32) for path in (self.teacher, self.student))
        return teacher, student.train(self.needs_training_mode)

    @property
    def needs_training_mode(self) -> bool:
        """Whether the model's code has no backward pass otherwise; the shrunk model has no dropout."""
        return self.name.startswith("reformer")

    @property
    def causal(self) -> bool:
        return is_causal(AutoConfig.from_pretrained(self.teacher))

    def target(self) -> int:
        reference = build_reference(AutoConfig.from_pretrained(self.teacher))
        stacks = layer_stacks(reference).values()
        matrices = sum(m * n for m, n in layer_linears(reference).values())
        matrices += sum(count * m * n for count, (m, n) in stacks)
        return count_parameters(reference) - matrices // 3

    def svd(self) -> None:
        student = llmdistill.compress(self.teacher, target_params=self.target(), output=self.student)
        assert is_factorized(student)
        check_equal(logits_of(self.auto.from_pretrained(self.student)), logits_of(student), "student loaded")

    def full_rank(self) -> None:
        reference = build_reference(AutoConfig.from_pretrained(self.teacher))
        shapes = layer_linears(reference) | {name: shape for name, (_, shape) in layer_stacks(reference).items()}
        embedding = min(token_embedding(reference)[1].weight.shape) if can_factorize_embedding(reference) else None
        ranks = {name: min(shape) for name, shape in shapes.items()}
        student = llmdistill.compress(self.teacher, ranks=ranks, embedding_rank=embedding)
        check_equal(logits_of(student), logits_of(self.model), "full rank", 1e-3)

    def gradients(self) -> None:
        reference = build_reference(AutoConfig.from_pretrained(self.teacher))
        allocation = "uniform" if layer_stacks(reference) else "loss"
        student = llmdistill.compress(
            self.teacher,
            target_params=self.target(),
            weighting="gradients",
            allocation=allocation,
            embedding_rank=8 if can_factorize_embedding(reference) else None,
            calibration={"data": rows(self.causal), "examples": 8, "held_out": 2},
            output=self.base / "weighted",
        )
        check_equal(logits_of(self.auto.from_pretrained(self.base / "weighted")), logits_of(student), "student loaded")

    def batch(self) -> dict[str, torch.Tensor]:
        labels = _IDS.masked_fill((_MASK == 0) | (torch.arange(12) < 3), -100)
        return {"input_ids": _IDS, "attention_mask": _MASK, "labels": labels}

    def kd(self) -> None:
        self.learn("kd")

    def makd(self) -> str | None:
        """All terms, or those that there are if the attention is more than queries times keys."""
        config = AutoConfig.from_pretrained(self.teacher)
        windows = [] if self.causal else [window for window in shape_of(config).windows if window is not None]
        if family_of(config).scores_are_products and not windows:
            return self.learn("makd")
        self.learn("makd", {"makd.attention": 0})
        return "without attention"

    def loss(self) -> None:
        """The divergence is the one of the stock models' logits."""
        teacher, student = self.pair()
        labels = self.batch()["labels"]
        shifted = functional.pad(labels[:, 1:], (0, 1), value=-100) if self.causal else labels
        both = []
        for folder in (self.teacher, self.student):
            with torch.no_grad():
                stock = self.auto.from_pretrained(folder).train(folder == self.student and self.needs_training_mode)
                logits = stock(input_ids=_IDS, attention_mask=_MASK).logits
            logits = logits[:, : _IDS.shape[1]]  # Perceiver's are of all positions
            both.append(logits[shifted != -100].log_softmax(-1))
        expected = functional.kl_div(both[1], both[0], log_target=True, reduction="batchmean").item()
        loss = llmdistill.DistillationLoss(teacher, student, method="kd", ratio=1.0)
        result = loss(self.batch())
        got = result.terms["forward_kl"].item()
        assert abs(got - expected) <= 1e-3 * max(1.0, expected), (
            f"the divergence is {got:.4g} instead of {expected:.4g}"
        )
        result.backward()
        loss.remove()
        unread = self.unread()
        names = [name for name, each in student.named_parameters() if each.grad is None and name.endswith(".A.weight")]
        names = [name for name in names if name.replace(".A.weight", ".weight") not in unread]
        assert not names, f"no gradient for {names[:2]}"

    def unread(self) -> set[str]:
        """The parameters of the teacher that its own logits do not depend on."""
        model = self.auto.from_pretrained(self.teacher)
        model.train(self.needs_training_mode)
        model.config.use_cache = False  # xLSTM keeps its states in place
        model(input_ids=_IDS, attention_mask=_MASK).logits.square().sum().backward()
        return {name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()}

    def learn(self, method: str, settings: dict[str, Any] | None = None) -> None:
        """Two steps of AdamW on the loss of a method, without an engine."""
        teacher, student = self.pair()
        loss = llmdistill.DistillationLoss(teacher, student, method, settings=settings)
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
        for _ in range(2):
            result = loss(self.batch())
            assert torch.isfinite(result.loss)
            result.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.remove()
        student.eval().save_pretrained(self.base / method)
        self.check_learned(self.base / method, student)

    def distill(self) -> None:
        """A whole run of kd, which takes a second more than its two steps."""
        settings = {"train.micro_batch_size": 2, "train.dtype": "fp32", "train.log_every": 1}
        result = llmdistill.distill(
            self.teacher,
            self.student,
            rows(self.causal),
            "kd",
            output_dir=self.base / "run",
            steps=2,
            learning_rate=1e-3,
            global_batch_size=4,
            settings=settings | {"data.max_length": 64, "data.max_prompt_length": 40},
        )
        assert all(torch.isfinite(torch.tensor(line["loss"])) for line in result.history)
        self.check_learned(result.folder / "student", result.student)

    def check_learned(self, folder: Path, student: PreTrainedModel) -> None:
        """A trained student is factorized, is loaded as it was saved, and all its factors have learned."""
        assert is_factorized(student)
        loaded = self.auto.from_pretrained(folder)
        check_equal(logits_of(loaded), logits_of(student), "trained student loaded")
        before = dict(self.auto.from_pretrained(self.student).named_parameters())
        factors = [name for name in before if name.endswith((".A.weight", "_factors"))]
        unread = self.unread()
        factors = [name for name in factors if name.replace(".A.weight", ".weight") not in unread]
        still = [name for name in factors if torch.equal(before[name], loaded.get_parameter(name))]
        assert not still, f"{len(still)} of {len(factors)} factors did not learn, such as {still[0]}"

    def export(self) -> None:
        source = next((path for path in (self.base / "makd", self.base / "kd") if path.is_dir()), None)
        source = self.student if source is None else source
        llmdistill.export(source, self.base / "dense")
        dense = self.auto.from_pretrained(self.base / "dense")
        assert not is_factorized(dense)
        check_equal(logits_of(dense), logits_of(self.auto.from_pretrained(source)), "exported")


def outcome(step: Callable[[], Any]) -> str:
    """`right` and what is to be noted, `refused: ...` or `wrong: ...`."""
    try:
        note = step()
    except UserError as error:
        return f"refused: {error}" if "\n" not in str(error) else f"wrong: several lines: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)
        ours = [each for each in frame if "/llmdistill/" in each.filename]
        place = f"{Path(frame[-1].filename).name}:{frame[-1].lineno}"
        place += f" from {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
        return f"wrong: {type(error).__name__}: {' '.join(str(error).split())[:400]} ({place})"
    return f"right {note}" if note else "right"


def run_type(name: str, steps: Sequence[str]) -> dict[str, Any]:
    """What became of each step of a type."""
    result: dict[str, Any] = {"type": name}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(name, Path(folder))
        if of_text_alone(name) and not has_encoder(name):  # whose class for a decoder leaves the encoder out
            broken = job.stock()
            if broken is not None:
                return result | {"stock": broken}
        else:
            try:
                AutoConfig.for_model(name).save_pretrained(job.teacher)
            except Exception as error:
                return result | {"stock": f"{type(error).__name__}: its default config contradicts itself"}
            save_tokenizer(job.teacher)
        for step in steps:
            result[step] = outcome(getattr(job, step.replace(" ", "_")))
            if step == "svd" and result[step] != "right":
                break
    return result | {"seconds": round(time.monotonic() - start, 1)}


def _child(name: str, file: str, steps: Sequence[str]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    line = run_type(name, steps)
    with open(file, "a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The last line of each type."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {line["type"]: line for line in map(json.loads, lines)}


def summary(line: dict[str, Any]) -> str:
    """What became of a type, in a few words."""
    if "stock" in line:
        return "transformers does not run it"
    if line["svd"].startswith("refused: "):
        reason = line["svd"].removeprefix("refused: ").partition(":")[0]
        return "refused, since it " + reason.partition(" ")[2].partition(", ")[0]
    wrong = [step for step in STEPS if line.get(step, "").startswith("wrong")]
    untried = [step for step in STEPS if step not in line]
    refused = [step for step in STEPS if line.get(step, "").startswith("refused")]
    if wrong:
        return "wrong: " + ", ".join(wrong)
    if untried:
        return "all works, not tried: " + ", ".join(untried)
    if refused:
        return "all works but " + " and ".join(_REFUSED.get(step, step) for step in refused)
    return _BEST if line["makd"] == "right" else "all works, MaKD without its attention term"


def write_table(results: dict[str, dict[str, Any]]) -> None:
    """Write what became of the types without an entry into docs/students.md, between the marks there."""
    types: dict[str, list[str]] = {}
    for name in model_types():
        if name not in FAMILIES:
            types.setdefault(summary(results[name]) if name in results else "not tried", []).append(name)
    named = {key: ", ".join(f"`{name}`" for name in names) for key, names in types.items()}
    named[_BEST] = f"the {len(types.get(_BEST, []))} others that transformers {transformers.__version__} has"
    rows = ((key, named[key]) for key in sorted(named, reverse=True))
    table = "".join(f"| {key} | {names} |\n" for key, names in rows)
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    text = f"{before}{MARKS[0]}\n| outcome | types |\n|---|---|\n{table}{MARKS[1]}{after}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--steps", nargs="*", default=STEPS)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument(
        "--write", action="store_true", help="only write the table of docs/students.md from the results"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.types) - model_types().keys())
    if unknown:
        parser.error(f"{', '.join(unknown)}: transformers has no decoder or encoder of this type with an LM head")
    done = read_results(arguments.results)
    if arguments.write:
        write_table(done)
        return
    for module in ("training.distillation_loss", "training.calibration", "students.start.weigh", "serving.export"):
        import_module(f"llmdistill.{module}")  # once, and not in each process
    run_type("llama", ("svd", "export"))  # what is imported late
    for name in arguments.types or [name for name in model_types() if name not in done]:
        process = multiprocessing.get_context("fork").Process(
            target=_child, args=(name, str(arguments.results), arguments.steps)
        )
        process.start()
        process.join(_TIMEOUT)
        if process.exitcode != 0:
            process.kill()
            process.join()
            with arguments.results.open("a", encoding="utf-8") as results:
                results.write(json.dumps({"type": name, "svd": f"wrong: ended with {process.exitcode}"}) + "\n")
        print(name, read_results(arguments.results)[name], file=sys.stderr)


if __name__ == "__main__":
    main()
