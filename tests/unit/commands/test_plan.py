"""``llmdistill plan`` from configurations alone: what it prints and writes, and its errors."""

import json
import shlex
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import BertConfig, LlamaConfig

from llmdistill import cli
from llmdistill.commands.plan import machine_of, notes, resolve
from llmdistill.config.command_line import parse_run
from llmdistill.config.machine import GPUS, MachineConfig, find_gpu
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.planning.choices import DS_CONFIGS
from llmdistill.planning.step import build_models, full_batch, interpolate, trace_step
from llmdistill.runtime.launch import split_launcher_flags
from llmdistill.students.counting import build_reference, count_parameters

MACHINE = ("--gpus", "2", "--gpu_memory", "24GB")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Models of config.json alone: a wide and a narrow decoder, and an encoder."""
    made = {}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1000}
    for name, config in {
        "wide": LlamaConfig(hidden_size=8192, intermediate_size=28672, num_key_value_heads=8, **sizes),
        "narrow": LlamaConfig(hidden_size=1024, intermediate_size=2048, num_key_value_heads=2, **sizes),
        "encoder": BertConfig(hidden_size=64, intermediate_size=128, architectures=["BertForMaskedLM"], **sizes),
    }.items():
        made[name] = tmp_path_factory.mktemp(name)
        config.save_pretrained(made[name])
    return made


@pytest.fixture
def run(folders) -> tuple[str, ...]:
    """A run that factorizes a small teacher."""
    small = ("--recipe", "quickstart", "--teacher.model", str(folders["narrow"]), "--student.factorize.rank", "64")
    return (*small, "--train.global_batch_size", "16", "--data.max_length", "112")


def planned(capsys, *arguments: str, code: int = 0) -> dict:
    assert cli.main(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_every_setting_has_its_memory_and_time(capsys, run):
    found = planned(capsys, *run, *MACHINE)
    # 5 ds_configs, micro batches of 1, 2, 4 and 8, with and without checkpointing, teacher whole, sharded or cached
    assert len(found["choices"]) == 5 * 4 * 2 * 3
    for choice in found["choices"]:
        assert choice["overrides"]["train.micro_batch_size"] * choice["accumulation_steps"] * 2 == 16
        assert choice["total_bytes"] == pytest.approx(sum(choice["memory_bytes"].values()), abs=20)
        assert choice["fits"]
        assert choice["step_seconds"] > 0
        # Three quarters of NVLink's 300 GB/s, and 0.6 of 312 TFLOP/s.
        assert choice["seconds"]["wire"] == pytest.approx(choice["wire_bytes"] / 225e9, rel=1e-6)
        assert choice["seconds"]["compute"] >= 0.999 * choice["flops"] / 187.2e12
    assert found["proposal"] in found["choices"]


@pytest.mark.parametrize(
    "setting", ["--student.quantize.weights=int8", "--train.compile=true", "--teacher.quantize=int8"]
)
def test_no_choice_is_one_that_the_run_refuses(capsys, run, setting):
    """Each way to launch it is planned as that run, which says itself whether it would begin."""
    settings = (*run, "--method", "kd", "--train.micro_batch_size", "8", setting)
    found = planned(capsys, *settings, *MACHINE)["choices"]
    given = {
        (each["ds_config"], each["teacher"])
        for each in found
        if not each["overrides"]["train.activation_checkpointing"]
    }
    runs = set()
    for ds_config, teacher in product(DS_CONFIGS, ("replicated", "zero3")):
        launched = (*settings, "--ds_config", ds_config, "--teacher.sharding", teacher)
        with suppress(UserError):
            resolve(parse_run(launched, METHODS)[0])
            runs.add((ds_config, teacher))
    assert {(ds_config, teacher) for ds_config, teacher in given if teacher != "cached"} == runs
    assert 0 < len(runs) < 10


def test_table_and_proposal_are_readable_on_80_columns(capsys, run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "proposal"
    assert cli.main(["plan", *run, *MACHINE, "--ds_config", "zero2", "--write", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "…" not in said
    for part in ("Teacher ", "Student ", "Machine ", "replicated", "activations", "total", "Proposal ", "Reason "):
        assert part in said
    lines = said.split("\nProposal")[0].splitlines()
    assert max(len(line) for line in lines if str(tmp_path.parents[1]) not in line) <= 80  # of other folders
    # The training takes what was written as it is, and the proposal overrides what was typed.
    command = shlex.split((folder / "launch.sh").read_text().splitlines()[1])
    assert command[:5] == ["exec", "llmdistill", "train", "--num_gpus", "2"]
    config, _ = parse_run(split_launcher_flags(command[3:])[1], METHODS)
    assert Path(config.ds_config) == folder / "ds_config.json"
    assert json.loads(Path(config.ds_config).read_text())["zero_optimization"]["stage"] == 2
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (8, 16)


def by_teacher(choices: list[dict], name: str) -> dict:
    return next(each for each in choices if each["teacher"] == name)


@pytest.fixture
def wide(run, folders) -> tuple[str, ...]:
    """A narrow student of a wide teacher."""
    models = ("--teacher.model", str(folders["wide"]), "--student.model", str(folders["narrow"]))
    return (*run[:2], *run[6:], *models, *KD)


KD = ("--method", "kd", "--ds_config", "zero1")


def test_cached_teacher_has_its_head_alone_and_no_pass(capsys, wide):
    found = planned(capsys, *wide, *MACHINE, "--train.micro_batch_size", "8")
    batch = {"train.micro_batch_size": 8, "train.activation_checkpointing": False}
    alike = [each for each in found["choices"] if each["overrides"].items() >= batch.items()]
    whole, cached = (by_teacher(alike, teacher) for teacher in ("replicated", "cached"))
    assert cached["memory_bytes"]["teacher"] == 2 * 1000 * 8192  # the head in bf16
    assert cached["memory_bytes"]["optimizer"] == whole["memory_bytes"]["optimizer"]
    # Of 2 FLOP a weight and token, those of the head remain; an embedding has none.
    tokens, head = 8 * 112, 1000 * 8192
    body = found["teacher_params"] - 2 * head
    assert whole["flops"] - cached["flops"] == pytest.approx(2 * tokens * body, rel=0.02)
    # Each sequence has 111 labels of 16,384 bytes, an id, and three offsets; 2 GPUs read 8 of them at 1.5 GB/s.
    assert found["cache"]["bytes_per_token"] == pytest.approx((111 * 16384 + 32) / 112)
    reading = 8 * 111 * 16384 * (2 / 1.5e9 + 1 / 18.75e9)
    assert cached["seconds"]["host"] == pytest.approx(reading)
    steps = 120
    assert found["cache"]["counts"]["sequences"] == 16 * steps
    assert found["cache"]["bytes"] == pytest.approx(16 * steps * 112 * found["cache"]["bytes_per_token"] + 2 * head)
    # One pass over every example once is spread over the steps that see every example once.
    assert found["cache"]["seconds"] == pytest.approx(steps * found["cache"]["seconds_per_step"])
    assert found["cache"]["seconds_per_step"] > 2 * tokens * body / 187.2e12 + reading

    top = planned(capsys, *wide, *MACHINE, "--cache.content", "top_k", "--cache.top_k", "8")
    assert by_teacher(top["choices"], "cached")["memory_bytes"]["teacher"] == 0
    assert top["cache"]["bytes_per_token"] == pytest.approx((111 * (8 * 8 + 4) + 32) / 112)


def test_proposal_of_a_cache_names_the_command_that_makes_it_first(capsys, wide, tmp_path):
    # The wide teacher fits only without the student and its buckets, so it must leave the GPUs of the training.
    folder = tmp_path / "proposal"
    settings = ("--gpus", "2", "--gpu_memory", "6.8GB", "--cache.content", "top_k", "--write", str(folder))
    assert cli.main(["plan", *wide, *settings]) == 0
    said = capsys.readouterr().out
    assert "teacher cached\n" in said
    _, first, launch = (folder / "launch.sh").read_text().splitlines()
    assert f"First      {first.removesuffix(' || exit')}\n" in said
    made = shlex.split(first)
    assert made[:4] == ["llmdistill", "cache", "--num_gpus", "2"]
    assert made[-5:] == ["--cache.content=top_k", "--output", str(folder / "cache"), "||", "exit"]
    config, _ = parse_run(split_launcher_flags(shlex.split(launch)[3:])[1], METHODS)
    assert config.teacher.cache == str(folder / "cache")
    assert config.teacher.sharding == "replicated"


def test_cache_is_no_choice_where_the_run_can_have_none(capsys, run, folders):
    encoder = ("--recipe", "minilm/6x384", "--student.shape", "1x32x8", "--minilmv2.relation_heads", "8")
    found = planned(capsys, *encoder, "--teacher.model", str(folders["encoder"]), *MACHINE, "--ds_config", "zero1")
    assert {each["teacher"] for each in found["choices"]} == {"replicated", "zero3"}
    assert found["cache"] is None
    task = ("--recipe", "finetune", "--data.task.name", "rte", "--method", "kd", "--student.model")
    task = (*task, str(folders["encoder"]), "--teacher.model", str(folders["encoder"]))
    classified = planned(capsys, *task, *MACHINE, "--ds_config", "zero1")
    for each in (found, classified):
        assert max(choice["memory_bytes"]["activations"] for choice in each["choices"]) > 0
        assert each["proposal"]["fits"]
    named = planned(capsys, *run, *MACHINE, *KD, "--teacher.cache", "somewhere")
    assert {each["teacher"] for each in named["choices"]} == {"cached"}
    assert "--output somewhere" in named["first_command"]
    assert "--teacher.cache" not in named["first_command"]


def test_counted_data_have_their_own_size(capsys):
    run = ("--count_data", *KD, "--train.steps", "1000", "--train.micro_batch_size", "4", "--gpus", "8")
    found = planned(capsys, *run, "--cache_space", "1MB")
    assert found["cache"]["counts"]["sequences"] == 2000
    assert found["cache"]["counts"]["labels"] < 0.5 * found["cache"]["counts"]["tokens"]
    assert found["cache"]["bytes"] > 1e6
    assert found["proposal"]["teacher"] == "replicated", "the disk has no room for it"


def test_a_cpu_is_a_machine_of_one_rank(capsys, run, monkeypatch):
    speed = ("--gpu_memory", "16GB", "--tflops", "0.1", "--memory_bandwidth", "20")
    found = planned(capsys, *run, "--gpus", "0", *speed)
    for choice in found["choices"]:
        assert choice["overrides"]["train.micro_batch_size"] * choice["accumulation_steps"] == 16
        assert choice["wire_bytes"] == 0
    assert len({choice["ds_config"] for choice in found["choices"]}) == 1, "there is nobody to share anything with"
    best = found["proposal"]
    assert best["memory_bytes"]["teacher"] == pytest.approx(4 * found["teacher_params"], rel=1e-3)  # fp32
    assert best["seconds"]["compute"] == pytest.approx(best["flops"] / (0.6 * 0.1e12), rel=0.1)
    assert best["memory_bytes"]["buckets"] <= 3 * 4 * found["student_params"], "what is never written takes no memory"
    assert "--num_gpus" not in found["command"]
    # Without a machine on the command line it is the one here.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    here = planned(capsys, *run, "--ds_config", "zero1")["machine"]
    assert here["gpus"] == 0
    assert here["tflops"] < 50, "measured"


def test_a_kind_of_gpu_has_the_figures_of_its_data_sheet_but_for_those_given(capsys, run):
    """NVIDIA's data sheets: dense bf16 TFLOP/s and GB/s of H100 SXM, H200 and L40S."""
    sheets = {"h100": (989, 3350, "80GB"), "h200": (989, 4800, "141GB"), "l40s": (362, 864, "48GB")}
    for kind, (tflops, bandwidth, memory) in sheets.items():
        found = planned(capsys, *run, "--gpu", kind, "--gpus", "2", "--ds_config", "zero2")
        machine = found["machine"]
        assert (machine["tflops"], machine["memory_bandwidth"], machine["gpu_memory"]) == (tflops, bandwidth, memory)
        best = found["proposal"]
        assert best["seconds"]["compute"] >= 0.999 * best["flops"] / (0.6e12 * tflops)
    machine = planned(capsys, *run, "--gpu", "h200", "--tflops", "500", "--ds_config", "zero2")["machine"]
    assert (machine["tflops"], machine["nvlink"]) == (500, 450)
    assert cli.main(["plan", *run, "--gpu", "2"]) == 2
    assert "h200" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "memory", "kind"), [
    ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
    ("NVIDIA H200", 150e9, "h200"),
    ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", 85e9, "a100"),
    ("NVIDIA L40S", 48e9, "l40s"),
    ("NVIDIA B200", 191e9, "b200"),
    ("NVIDIA L40", 48e9, None),
    ("Tesla V100-SXM2-16GB", 17e9, None),
])  # fmt: skip
def test_the_gpus_of_this_machine_are_planned_for(name, memory, kind, capsys, run, monkeypatch):
    assert find_gpu(name, int(memory)) == kind
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda _: SimpleNamespace(name=name, total_memory=int(memory))
    )
    machine = machine_of(MachineConfig(), [])
    assert (machine.gpus, machine.gpu_memory) == (3, f"{memory / 1e9:.1f}GB")
    assert machine.tflops == GPUS[kind or "a100"]["tflops"]
    assert (f"{name} is not among the kinds of --gpu" in capsys.readouterr().err) == (kind is None)
    machine = machine_of(MachineConfig(gpus=8, gpu_memory="24GB"), ["--gpus", "8", "--gpu_memory", "24GB"])
    assert (machine.gpus, machine.gpu_memory) == (8, "24GB")


def test_a_forecast_says_what_it_leaves_out():
    words = ["--recipe", "quickstart", "--method", "kd"]
    assert notes(parse_run(words, METHODS)[0]) == []
    several = [*words, "--teacher.others.more.model", "a", "--data.on_policy", "0.5"]
    (teachers, answers) = notes(parse_run(several, METHODS)[0])
    assert teachers == "the teachers beside teacher.model (teacher.others) are not in the forecast"
    assert answers.endswith("(data.on_policy) are not in the forecast")


def test_micro_batches_between_two_traces(run):
    config, _ = parse_run(["--ds_config", "zero2", *run], METHODS)
    plan = resolve(config)
    models = build_models(plan)
    # The forecast counts the parameters that the dry run counts, and no more than the target for ranks left to data.
    assert count_parameters(models.student) == pytest.approx(plan.models.sizes["student_params"], rel=0.01)
    assert count_parameters(models.teacher) == count_parameters(build_reference(plan.models.teacher))
    traces = {size: trace_step(models, full_batch(plan, size), checkpointing=False) for size in (1, 3, 5)}
    found = interpolate(traces[1], traces[5], 3)
    peaks = [max(sum(moment.live.values()) for moment in trace.moments) for trace in (found, traces[3])]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    assert found.student.flops == pytest.approx(traces[3].student.flops, rel=1e-6)
    assert found.teacher.flops == pytest.approx(traces[3].teacher.flops, rel=1e-6)


def test_ranks_that_cut_a_teacher_share_its_vocabulary_in_the_forecast(capsys, run):
    words = (*run, *MACHINE, "--method", "kd", "--ds_config", "zero2", "--teacher.sharding")
    whole, cut, cached = (
        next(choice for choice in planned(capsys, *words, sharding)["choices"] if choice["teacher"] == teacher)
        for sharding, teacher in (("replicated", "replicated"), ("tensor", "tensor"), ("tensor", "cached"))
    )
    # Two layers of 8 heads, two of which are of keys and values, an embedding and an LM head of 1,000 tokens, in bf16.
    linears = 2 * (2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 2048 * 1024) + 2 * 1000 * 1024
    assert whole["memory_bytes"]["teacher"] - cut["memory_bytes"]["teacher"] == linears * 2 / 2
    # The other rank's inputs of the LM head, at the 111 labels of a row of 112 tokens.
    assert cut["memory_bytes"]["taps"] - whole["memory_bytes"]["taps"] == 111 * 1024 * 2
    assert cached["memory_bytes"]["taps"] == whole["memory_bytes"]["taps"]
    # In 8 micro batches half of the sums, of the embedding too, goes out and in, and the logits of half the vocabulary.
    assert cut["node_bytes"] == 8 * (2 * 112 * (5 * 1024) * 2 + 111 * 500 * 2)
    assert whole["node_bytes"] == cached["node_bytes"] == 0
