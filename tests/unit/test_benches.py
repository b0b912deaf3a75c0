"""The benches: their statistics, what a row and the bench say to each other, and figures that no clock decides."""

import argparse
import json
import math
import random
import sys
import textwrap
from importlib import import_module
from math import nan
from pathlib import Path
from unittest.mock import patch

import bench_calibration
import bench_host
import bench_llama
import bench_pretrained
import bench_scale
import bench_serve
import bench_tokens
import bench_zero
import benching
import peer_rows
import pytest
import step_rows
import torch
from bench_starts import zero_sum_ranks
from benching import Line, Measured, Settings, Table, facts_of, measure, time_ratio
from torch.nn.functional import kl_div
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import llmdistill
from llmdistill.batch import Batch
from llmdistill.data.prompts import render_prompt, resolve_prompt
from llmdistill.data.sources import examples_of
from llmdistill.embedded import locate
from llmdistill.students.start import sampled
from llmdistill.students.start.weighted import WeightedSVD

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY = {"width": 16, "heads": 2, "vocabulary": 40, "layers": 4, "student_layers": 4, "batch": 2, "tokens": 12}
NARROW = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
SETTINGS = Settings(quick=True, device="cpu", threads=1, repeats=3)


@pytest.mark.parametrize(("bench", "words"), [
    ("bench_starts", "--model embedded:teacher --calibration no.txt --test no.txt --output out"),
    ("bench_tokens", "--teacher embedded:teacher --valid embedded:unseen --arms no.txt --output out"),
    ("bench_serve", "--teacher /no.txt --student a=/no.txt --graphs out"),
])  # fmt: skip
def test_a_missing_input_is_one_sentence(bench, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [bench, *words.split()])
    with pytest.raises(SystemExit) as exit_:
        benching.run(import_module(bench).main)
    assert exit_.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert "no.txt" in said
    assert not list(tmp_path.iterdir())


def test_ratio_is_the_median_of_the_rounds_ratios():
    # The machine slows down on the way: the ratio of the medians would be 2 / 3.
    assert time_ratio(Measured([1.0, 2.0, 6.0]), Measured([3.0, 4.0, 3.0])) == 0.5
    assert str(time_ratio(Measured(), Measured())) == "nan"


@pytest.mark.parametrize(
    ("value", "target", "at_least", "expected"),
    [(1.0, 1.0, False, "ok"), (1.01, 1.0, False, "MISS"), (1.0, 1.1, True, "MISS"), (nan, 1.0, False, "")],
)
def test_verdict(value, target, at_least, expected):
    line = Line("x", value, target, at_least=at_least)
    assert [line.verdict(quick=quick) for quick in (False, True)] == [expected, ""]


def test_json_line_has_no_nan(capsys):
    table = Table(SETTINGS)
    for name, value in (("a", nan), ("b", -2.61234e-12), ("c", 3)):
        table.add(Line(name, value))
    table.finish()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"a": None, "b": -2.612e-12, "c": 3}


BENCH = """
    import os, time
    import torch
    from benching import Work

    def build(row, device):
        facts = {"threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"], "process": os.getpid()}
        calls = []
        def call():
            print("a library says something")
            calls.append(1)
            time.sleep(row["seconds"])
            part = torch.ones(row["megabytes"] * 250_000)
            del part
            return float(len(calls))
        return Work(None if row["kind"] == "facts" else call, facts)
"""


def test_rows_are_processes_of_their_own_that_take_turns(tmp_path, monkeypatch):
    """The rows sleep, and fill memory."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sleepy_bench.py").write_text(textwrap.dedent(BENCH))
    build = import_module("sleepy_bench").build
    described = {
        "small": {"kind": "work", "seconds": 0.01, "megabytes": 20},
        "large": {"kind": "work", "seconds": 0.03, "megabytes": 80},
    }
    found = measure(build, described, SETTINGS)
    facts = [*(one.facts for one in found.values()), facts_of(build, {"kind": "facts"}, SETTINGS)]
    assert len({each["process"] for each in facts}) == 3
    assert all((each["threads"], each["omp"]) == (1, "1") for each in facts)
    assert found["small"].facts["first"] == 1.0
    assert [len(one.seconds) for one in found.values()] == [3, 3]
    assert all(seconds >= 0.03 for seconds in found["large"].seconds)
    assert all(seconds >= 0.01 for seconds in found["small"].seconds)
    if sys.platform.startswith("linux"):
        # What was alive at once, neither the two calls' together nor what the allocator keeps.
        assert found["small"].bytes / 1e6 == pytest.approx(20, abs=2)
        assert found["large"].bytes / 1e6 == pytest.approx(80, abs=2)


def test_naive_makd_is_the_same_loss_as_ours():
    row = {"task": "makd", **TINY, "rank": 4}
    losses = {way: step_rows.build({**row, "way": way}, CPU).call() for way in ("ours", "naive")}
    assert losses["ours"] == pytest.approx(losses["naive"], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "sizes"), [("kd", {"student_layers": 2, "labeled": 0.4}), ("encoder", {"student_layers": 2})]
)
def test_steps_leave_no_gradient_and_barely_move(task, sizes):
    row = {"task": task, "way": "ours", **TINY, **sizes}
    for way in (step_rows.floor, step_rows.ours):
        setting = step_rows.make_setting(row, CPU)
        step = way(setting, row)
        first, second = step(), step()
        assert first == pytest.approx(second, rel=1e-4)
        assert all(parameter.grad is None for parameter in setting.student.parameters())


def test_labeled_share_stands_at_the_end():
    row = {"task": "kd", "way": "floor", **TINY, "tokens": 10, "labeled": 0.4}
    setting = step_rows.make_setting(row, CPU)
    assert (setting.labels != -100).tolist() == [[False] * 6 + [True] * 4] * 2
    assert setting.labels[:, 6:].equal(setting.ids[:, 6:])


@pytest.mark.parametrize(("labeled", "length"), [(1.0, 1), (0.5, 6)])
def test_peers_have_the_same_prompts_and_as_many_tokens_to_write(labeled, length):
    setting = step_rows.make_setting({"task": "kl", "way": "ours", **TINY, "labeled": labeled}, CPU)
    prompts, answers = peer_rows.prompts_and_answers(setting)
    assert [*map(len, prompts), *map(len, answers)] == [length] * 2 + [12 - length] * 2
    (batch,) = peer_rows.written(setting)(0)
    assert batch.labels_are == "samples"
    assert sorted(batch.input_ids[:, :length].tolist()) == sorted(prompts)
    assert (batch.labels[:, :length] == -100).all()
    assert batch.input_ids.shape[1] <= 12


@pytest.mark.parametrize("labeled", [1.0, 0.4])
def test_trls_trainers_have_our_loss_on_given_answers(labeled):
    pytest.importorskip("trl")
    row = {"task": "kl", **TINY, "labeled": labeled, "on_policy": False}
    ours, *theirs = (peer_rows.build({**row, "way": way}, CPU).call() for way in ("ours", "gkd", "distillation"))
    assert theirs == pytest.approx([ours, ours], abs=3e-6)


def test_calibration_counts_the_bytes_of_its_statistics():
    config = LlamaConfig(**NARROW, num_hidden_layers=1, vocab_size=40)
    # Queries, keys and values read the same 16 features, as gates and the first feed-forward matrix do.
    inputs, outputs = 3 * 16**2 + 24**2, (16**2 + 2 * 8**2) + 16**2 + 2 * 24**2 + 16**2
    batch = Batch(*[torch.ones(1, 5, dtype=torch.long)] * 3)
    assert bench_calibration.statistics_bytes(LlamaForCausalLM(config), batch) == 4 * (inputs + outputs)
    assert bench_calibration.decomposed(70, 80, CPU) > 0


def test_operations_are_counted_without_views_and_a_calibration_adds_few():
    with bench_host.Operations() as counted:
        (torch.ones(2) + 1).view(2, 1).T.exp_()
    assert counted.count == 3
    counts = {}
    with (
        patch.object(sampled, "tokens_at_a_time"),
        patch.object(sampled, "give_back_memory"),
    ):  # which the bench changes
        for name, row in bench_host.make_rows(3, CPU).items():
            with bench_host.Operations() as counted:
                row.call()
            counts[name] = counted.count
    assert counts["calibration"] < 1.5 * counts["plain forward and backward pass"]
    assert counts["costs of cuts"] < 2 * counts["plain forward and backward pass"]
    assert counts["held-out check of a cut"] < 3 * counts["plain forward pass"]
    assert counts["KD step"] < 1.25 * counts["plain step"]
    assert counts["scoring"] < 1.5 * counts["plain forward pass"]
    assert counts["answers"] < counts["plain generate"]


def test_a_step_without_deepspeed_moves_what_it_must():
    """In bytes per parameter: gradients read for the norm, cast, scaled, AdamW's reads and writes, weights cast."""
    found = bench_zero.floor()
    assert found.bytes == pytest.approx(2 + (2 + 4) + (4 + 4) + 7 * 4 + (4 + 2), abs=0.01)
    assert 3 < found.operations < 4


def test_growth_is_the_ratio_of_the_rounds_over_that_of_the_products():
    start = Measured(seconds=[1.0, 2.0, 4.0], facts={"multiply_adds": 10})
    larger = Measured(seconds=[3.0, 5.0, 12.0], facts={"multiply_adds": 20})
    assert bench_scale.grew("larger", start, larger).value == 1.5


def test_serving_counts_the_products_of_a_runtime(tmp_path):
    teacher = LlamaForCausalLM(LlamaConfig(**NARROW, num_hidden_layers=3, vocab_size=40))
    teacher.save_pretrained(tmp_path / "teacher")
    llmdistill.compress(str(tmp_path / "teacher"), ranks={"*.mlp.*": 2}).save_pretrained(tmp_path / "student")
    attention, dense, factors = 2 * 16 * 16 + 2 * 16 * 8, 3 * 16 * 24, 3 * 2 * (16 + 24)
    for name, feed_forward in (("teacher", dense), ("student", factors)):
        layers = 3 * (attention + feed_forward)
        found = bench_serve.multiply_adds(str(tmp_path / name), 5, 4, all_logits=True)
        assert found["prefill"] == 5 * (layers + 16 * 40) + 3 * 2 * 16 * 5 * 5
        assert found["generate"] == 4 * (layers + 16 * 40) + 3 * 2 * 16 * (6 + 7 + 8 + 9)
        of_last = bench_serve.multiply_adds(str(tmp_path / name), 5, 4, all_logits=False)
        assert found["prefill"] - of_last["prefill"] == 4 * 16 * 40


@pytest.mark.parametrize("seed", range(5))
def test_zero_sum_ranks_are_those_of_a_plain_search(seed):
    shapes = {"a": (6, 10), "b": (8, 8), "c": (12, 5)}
    torch.manual_seed(seed)
    values = {name: torch.rand(min(shape)).sort(descending=True).values for name, shape in shapes.items()}
    slopes = {name: torch.randn(min(shape)) for name, shape in shapes.items()}
    empty = torch.zeros(0)
    factors = {
        name: WeightedSVD(left=empty, values=each, right=empty, energy=0.0, scale=1.0) for name, each in values.items()
    }
    budget = random.Random(seed).randint(60, 150)

    ranks, running = {name: min(shape) for name, shape in shapes.items()}, 0.0

    def params():
        return sum(min(ranks[name] * (m + n), m * n) for name, (m, n) in shapes.items())

    while params() > budget:
        offers = [(float(-values[n][r - 1] * slopes[n][r - 1]), n) for n, r in ranks.items() if r > 1]
        wanted = [each for each in offers if (each[0] > 0) == (running <= 0)] or offers
        change, name = min(wanted, key=lambda each: abs(each[0]))
        running += change
        ranks[name] -= 1
    kept = {name: rank for name, rank in ranks.items() if rank * sum(shapes[name]) < math.prod(shapes[name])}
    assert zero_sum_ranks(factors, slopes, shapes, budget) == kept


def test_tokens_scores_by_plain_logits_and_goes_on(monkeypatch, tmp_path):
    teacher, tokenizer = (
        auto.from_pretrained(locate("embedded:teacher")) for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    student = llmdistill.compress("embedded:teacher", target_params="45%")
    student.save_pretrained(tmp_path / "start")
    total = count = 0
    for example in examples_of("embedded:unseen")[:3]:
        answer = tokenizer(example.outputs[0], add_special_tokens=False)["input_ids"]
        prompt = tokenizer(render_prompt(example, tokenizer, resolve_prompt(None, [tokenizer])))["input_ids"]
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad():
            ours, theirs = (model(ids).logits[0, :-1].log_softmax(-1) for model in (student, teacher))
        total += kl_div(ours, theirs, reduction="sum", log_target=True).item()
        count += len(ours)

    arm = {"student": str(tmp_path / "start"), "train": "embedded:train", "tokens": [0, 900], "step_tokens": 300}
    arm |= {"settings": {"kd.ratio": 1}, "average": 1, "learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0}
    (tmp_path / "arms.jsonl").write_text(json.dumps(arm))
    words = "--teacher embedded:teacher --valid embedded:unseen --rows 3 --arms arms.jsonl --output out.jsonl"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_tokens", *words.split()])
    for _ in range(2):  # the second time nothing is left to do
        bench_tokens.main()
        before, after = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert before["kl"] == pytest.approx(total / count, rel=1e-4)
    assert after["kl"] < 0.8 * before["kl"]
    assert after["seen"] >= 900
    assert after["averaged"]["kl"] == pytest.approx(after["kl"], rel=1e-5)  # an average over one token is the student

    def call(output, *options):
        monkeypatch.setattr(sys, "argv", ["bench_tokens", *words.replace("out.jsonl", output).split(), *options])
        bench_tokens.main()

    # A training that ends in the middle goes on from the step saved last, and arrives where the other did.
    clips = iter([clip_grad_norm_, clip_grad_norm_, None])
    ends = patch.object(bench_tokens, "clip_grad_norm_", lambda *arguments: next(clips)(*arguments))
    with ends, pytest.raises(TypeError):
        call("killed.jsonl", "--save_minutes", "0")
    with patch.object(bench_tokens, "clip_grad_norm_", wraps=clip_grad_norm_) as clip:
        call("killed.jsonl")
    assert clip.call_count == 1
    again = json.loads(Path("killed.jsonl").read_text().splitlines()[-1])
    assert (again["kl"], again["averaged"], again["seen"]) == (after["kl"], after["averaged"], after["seen"])
    assert len(Path("killed.jsonl").read_text().splitlines()) == 2

    call("padded.jsonl", "--rows_at_a_time", "3")
    padded = [json.loads(line)["kl"] for line in Path("padded.jsonl").read_text().splitlines()]
    assert padded == pytest.approx([before["kl"], after["kl"]], rel=1e-3)


@pytest.mark.parametrize(
    ("size", "parameters"), [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("8b", 7_504_924_672), ("tiny", 106_048)]
)
def test_llama_shapes_have_their_parameters(size, parameters):
    # Llama-3.2-1B and -3B as published; Llama-3-8B's 8,030,261,248 less an LM head of 128,256 × 4,096.
    model = bench_llama.make_model(size, torch.device("meta"))
    assert sum(one.numel() for one in model.parameters()) == parameters


def test_ways_of_a_llama_step_have_the_losses_of_plain_torch():
    case, lines = bench_llama.TINY["tiny"], {}
    for way in ("floor", "ours", "ours+int8", "ours+cache"):
        lines[way] = bench_llama.measure_way(case, way, CPU, repeats=1)
    setting = bench_llama.make_setting(case, CPU)
    with torch.no_grad():
        logits, teacher = (model(setting.ids).logits[:, :-1].double() for model in (setting.student, setting.teacher))
    labels = torch.nn.functional.cross_entropy(logits.flatten(0, 1), setting.ids[:, 1:].flatten())
    divergence = (
        kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    )
    assert lines["floor"]["loss"] == pytest.approx(labels.item(), rel=1e-2)  # bf16
    assert lines["ours"]["loss"] == pytest.approx(divergence.item(), rel=3e-2)
    assert lines["ours"]["tokens_per_second"] > 0
    assert lines["ours+cache"]["loss"] == lines["ours"]["loss"]
    assert lines["ours+int8"]["loss"] == pytest.approx(lines["ours"]["loss"], rel=1e-2)
    assert 0 < lines["ours+int8"]["nats"] < 1e-4


def test_a_way_that_is_none_is_refused_before_the_first_one():
    assert bench_llama.way("zero2+compiled+fp8") == "zero2+compiled+fp8"
    for text in ("fast", "floor+fp8", "trl+cache", "ours+fp4"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"ours\+compiled"):
            bench_llama.way(text)


def test_what_is_missing_or_too_large_is_an_error_of_its_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    ours, theirs = torch.multiprocessing.Pipe(duplex=False)
    bench_llama.be_the_process(theirs, bench_llama.TINY["tiny"], "trl", "cpu", 1)
    assert "trl" in ours.recv()["error"]


def test_a_pretrained_decoder_is_timed_part_by_part(capsys, monkeypatch):
    small = "--answers 2 --examples 2 --max_prompt_length 64 --max_length 72 --sizes 60% 70%"
    monkeypatch.setattr(sys, "argv", ["bench_pretrained.py", *small.split()])
    monkeypatch.setenv("LLMDISTILL_CACHE", "unused")
    bench_pretrained.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    parts = ["find or dequantize the model", "load, and write answers", "compress", "another size"]
    assert [line["part"] for line in lines] == parts
    assert 2 <= lines[1]["tokens"] <= 16
    assert 0.5 < lines[2]["parameters"] / 1_220_000 < 0.62 < lines[3]["parameters"] / 1_220_000 < 0.72
