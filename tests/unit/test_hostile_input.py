"""What broke a run with a traceback, or far into it, and the sentence that meets it now."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hostile import refuses

import llmdistill
from llmdistill.cli import main as llmdistill_command
from llmdistill.config import DataConfig, TaskConfig, TrainConfig
from llmdistill.config.command_line import build, changed, parse_run
from llmdistill.data.pairs import PairExample
from llmdistill.data.sources import examples_of, read_examples, write_rows
from llmdistill.errors import UserError, check_name
from llmdistill.files import check_writable, json_lines, new_folder, refused_by_system, write_json
from llmdistill.methods import METHODS
from llmdistill.runtime import ds_check
from llmdistill.runtime.ds_check import check_ds_config
from llmdistill.runtime.ds_config import SHIPPED, read_ds_config
from llmdistill.runtime.engine import BatchSplit, student_ds_config
from llmdistill.runtime.hosts import read_hosts
from llmdistill.runtime.terminal import exit_code
from llmdistill.tasks.glue_files import read_split
from llmdistill.tasks.instructions import _chance
from llmdistill.tasks.squad_files import _checked, _file_rows
from llmdistill.train import main

# DeepSpeed's configuration: each change of zero2.json, or the text of a file, and what is said.

DS_CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ({"fp16": True}, "fp16 is true: expected a block"),
    ({"bf16": True}, "bf16 is true: expected a block"),
    ({"bf16": None}, "bf16 is null: expected a block"),
    ({"zero_optimization": 2}, "zero_optimization is 2: expected a block"),
    ({"optimizer": "x"}, 'optimizer is "x": expected a block'),
    ({"optimizer": {"params": 3}}, "optimizer.params is 3: expected a block"),
    ({"tensorboard": True}, "tensorboard is true: expected a block"),
    ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage is 7: give 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage is '2': give 0, 1, 2 or 3"),
    ({"zero_optimization": {"reduce_bucket_size": "1e3"}}, "zero_optimization.reduce_bucket_size is '1e3': DeepSpeed"),
    ({"zero_optimization": {"reduce_bucket_size": float("nan")}}, "zero_optimization.reduce_bucket_size is nan"),
    ({"zero_optimization": {"stag": 2}}, "did you mean zero_optimization.stage?"),
    (
        {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
        "mean zero_optimization.offload_optimizer.device?",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
        "'gpu': DeepSpeed refuses it (input should be 'no",
    ),
    ({"gradient_cliping": 1.0}, "gradient_cliping: DeepSpeed has no such setting; did you mean gradient_clipping?"),
    ({"timers": {"throughput": {"enabld": True}}}, "did you mean timers.throughput.enabled?"),
    ({"tensorboard": {"enabld": True}}, "did you mean tensorboard.enabled?"),
    ({"checkpoint": {"tag_validaton": "Warn"}}, "did you mean checkpoint.tag_validation?"),
    ({"flops_profiler": {"profile_stp": 1}}, "did you mean flops_profiler.profile_step?"),
    ({"aio": 5}, "aio is 5: DeepSpeed refuses it"),
    ({"steps_per_print": "1e3"}, "steps_per_print is '1e3': DeepSpeed refuses it (input should be a valid number)"),
    (
        {"wall_clock_breakdown": "x"},
        "wall_clock_breakdown is 'x': DeepSpeed refuses it (input should be a valid bo",
    ),
    ({"optimizer": {"type": 5}}, "optimizer.type is 5: DeepSpeed refuses it (input should be a valid string)"),
    ({"gradient_allreduce_op": "sume"}, "DeepSpeed refuses the configuration (Invalid gradient_allreduce_op."),
    ({"optimizer": {"type": "Adem"}}, "optimizer.type is 'Adem', which DeepSpeed does not have; did you mean Adam?"),
    ({"optimizer": {"type": "SGD"}}, "optimizer.params.betas: SGD has no such parameter"),
    ({"optimizer": {"params": {"beta": 1}}}, "optimizer.params.beta: AdamW has no such parameter, only"),
    ("[" * 28_000, "z.json:1: not valid JSON (nested too deeply)"),
    ('{\n"seed": ' + "1" * 5_000 + "}", "z.json:2: not valid JSON (a number with too many digits)"),
    ('{"a": "\\ud800"}', "z.json:1: not valid JSON (a \\ud... escape without its other half"),
]


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    inner = {key: merged(config[key], value) for key, value in change.items() if both(config.get(key), value)}
    return {**config, **change, **inner}


def both(first: Any, second: Any) -> bool:
    return isinstance(first, dict) and isinstance(second, dict)


def ds_file(folder: Path, change: dict[str, Any] | str) -> str:
    shipped = json.loads((SHIPPED / "zero2.json").read_text())
    file = folder / "z.json"
    file.write_text(change if isinstance(change, str) else json.dumps(merged(shipped, change)))
    return str(file)


def check(path: str) -> None:
    settings = TrainConfig(dtype="bf16")
    check_ds_config(student_ds_config(read_ds_config(path), path, settings, BatchSplit(64, 1), output_dir="o"), path)


@pytest.mark.parametrize(("change", "said"), DS_CONFIGS, ids=lambda each: str(each)[:40])
def test_a_ds_config(tmp_path: Path, change: dict[str, Any] | str, said: str) -> None:
    refuses(said, check, ds_file(tmp_path, change))


ACCEPTED: list[dict[str, Any]] = [
    {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": None, "profile": False}},
    {"flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "detailed": True}},
    {"comms_logger": {"enabled": False, "verbose": True}, "steps_per_print": 10, "prescale_gradients": False},
    {"wandb": {"enabled": False, "team": "a", "project": "7"}, "csv_monitor": {"enabled": False}},
    {"checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}}, "dump_state": False},
    {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", "memory_breakdown": True},
    {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8, "stage3_gather_16bit_weights_on_model_save": True}},
    {"zero_optimization": {"cpu_offload": True}, "aio": {"block_size": 5}, "gradient_predivide_factor": 2},
    {"optimizer": {"params": {"fused": True, "torch_adam": True}}, "zero_allow_untested_optimizer": True},
    {
        "optimizer": {
            "type": "Adam",
            "params": {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": True},
        }
    },
]


@pytest.mark.parametrize("change", ACCEPTED, ids=lambda each: ", ".join(each))
def test_what_deepspeed_knows_is_not_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    check(ds_file(tmp_path, change))


def test_every_key_that_deepspeed_reads_is_known() -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig

    read: set[str] = set()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    DeepSpeedConfig(Watched(train_micro_batch_size_per_gpu=1))
    assert len(read) > 40
    assert read - _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= ds_check._keys(ds_check._top_level()).keys()


def test_a_ds_config_is_checked_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = ds_file(tmp_path, {"zero_optimization": {"stag": 2}})
    assert main(["--ds_config", path, "--dry_run", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("did you mean zero_optimization.stage?; fix or remove it\n")
    assert captured.err.count("\n") == 1


# Recipes and command lines.

RECIPES = [
    ("scoring: []", "mine.yaml: scoring is []: a section holds settings"),
    ("train: 5", "mine.yaml: train is 5: a section holds settings"),
    ("train:", "mine.yaml: train is null: a section holds settings"),
    ("student: {factorize: x}", "mine.yaml: student.factorize is 'x': a section holds settings"),
    ("train: {learning_rate: 1e+38}", "train.learning_rate is 1e+38: give 10.0 or less"),
    ("train: {learning_rate: .nan}", "train.learning_rate is nan: give a finite number"),
    ("train: {weight_decay: .inf}", "train.weight_decay is inf: give a finite number"),
    ("train: {weight_decay: 1e+9}", "train.weight_decay is 1000000000.0 and train.learning_rate"),
    ("train: {betas: [0.9, 1.0]}", "train.betas is [0.9, 1.0]: give two numbers from 0 to below 1"),
    ("train: {betas: [.nan, 0.9]}", "train.betas is nan: give a finite number"),
    ("train: {eps: 0}", "train.eps is 0.0: give a number over 0"),
    ("student: {lora: {rank: 4, alpha: 0}}", "student.lora.alpha is 0.0: give a number over 0"),
    ("makd: {query: .inf}", "makd.query is inf: give a finite number"),
    ("kd: {beta: .nan}", "kd.beta is nan: give a finite number"),
    ("seed: 99999999999999999999999", "seed has 77 bits: give a number of at most 63"),
    ("seed: " + "1" * 5_000, "mine.yaml: not valid YAML"),
    ("seed: " + "[" * 28_000, "mine.yaml: not valid YAML"),
    ("seed: !!timestamp x", "mine.yaml: not valid YAML"),
    ("student: &a [*a]", "mine.yaml: it has more than 100000 values"),
    ("extends: " + "n" * 400, "neither a shipped recipe nor a file"),
    ("data: {tests: {a/b: x.jsonl}}", "data.tests has the name 'a/b': it becomes a file's"),
    ("data: {tests: {../../x: x.jsonl}}", "data.tests has the name '../../x'"),
    ("data: {tests: {'': x.jsonl}}", "data.tests has the name ''"),
    ('data: {tests: {"a\\nb": x.jsonl}}', "data.tests has the name 'a\\nb'"),
    ("data: {tests: {%s: x.jsonl}}" % ("n" * 400), "of 400 bytes: give 200 at most"),
    ("tasks: {out_of_domain: {../x: {}}}", "tasks.out_of_domain has the name '../x'"),
]


@pytest.mark.parametrize(("text", "said"), RECIPES, ids=lambda each: each[:40])
def test_a_recipe(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    refuses(said, parse_run, ["--ds_config", "zero2", "--recipe", str(file)], METHODS)


WORDS = [
    (["--recipe"], "argument --recipe: expected one argument"),
    (["--recipe", "n" * 400], "neither a file nor a shipped recipe"),
    (["--train", "5"], "train: '5' does not fit; expected settings"),
    (["--train.steps", "9" * 5_000], "train.steps: a number with too many digits; give a smaller one"),
    (["--train.learning_rate", "9" * 400], "train.learning_rate has 1329 bits"),
    (["--data.tests./etc/x", "a.jsonl"], "data.tests has the name '/etc/x'"),
    (["--output_dir", "a\0b"], "it holds what is no character"),
    (["--output_dir", "\udcff"], "it holds what is no character"),
]


@pytest.mark.parametrize(("words", "said"), WORDS, ids=lambda each: str(each)[:40])
def test_a_command_line(words: list[str], said: str) -> None:
    refuses(said, parse_run, ["--ds_config", "zero2", *words], METHODS)


def test_a_line_end_in_a_name_does_not_break_the_sentence() -> None:
    refuses("--recipe a\\nb: neither", parse_run, ["--recipe", "a\nb"], METHODS)
    assert len(str(UserError("x" * 10**6 + "the remedy"))) < 5_000
    assert str(UserError("x" * 10**6 + "the remedy")).endswith("the remedy")


def test_null_for_a_number_in_python() -> None:
    for value in (TrainConfig(), METHODS["kd"].defaults()):
        key = "eps" if isinstance(value, TrainConfig) else "beta"
        with pytest.raises(UserError, match=f"^part.{key} is null: give a value"):
            changed(value, {key: None}, key="part")


@pytest.mark.parametrize("kind", [DataConfig, TaskConfig])
def test_names_of_files_stay_in_their_folder(kind: type[Any]) -> None:
    key = "tests" if kind is DataConfig else "out_of_domain"
    for name in ("..", ".hidden", "a\\b", "a\u2028b"):
        refuses(f"{key} has the name", build, {key: {name: "x" if kind is DataConfig else {}}}, kind)
    check_name("GPT-4 (été), 2.5", "data.tests")


def test_names_in_python_stay_in_their_folder(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b"}]
    with pytest.raises(UserError, match=r"data has the name '../x'"):
        llmdistill.evaluate("embedded:teacher", {"../x": rows}, output=tmp_path)


# Rows.

GOOD = {"instruction": "a", "input": "", "output": "b"}
ROWS: list[tuple[bytes, str]] = [
    (json.dumps({**GOOD, "output": "\ud800"}).encode(), "a.jsonl:2: not JSON (a \\ud... escape without its other half"),
    (b'{"instruction": ' + b"[" * 28_000, "a.jsonl:2: not JSON (nested too deeply"),
    (b'{"instruction": ' + b"1" * 4_400 + b"}", "a.jsonl:2: not JSON (a number with too many digits"),
    (b'{"instruction": "\xe9", "output": "b"}', "a.jsonl:2: cannot be read as UTF-8 text"),
]


@pytest.mark.parametrize(("row", "said"), ROWS, ids=lambda each: str(each)[:30])
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_row(tmp_path: Path, row: bytes, said: str, ending: str) -> None:
    file = tmp_path / f"a.{ending}"
    lines = [json.dumps(GOOD).encode(), row]
    file.write_bytes(b"\n".join(lines) if ending == "jsonl" else b"[" + b",\n".join(lines) + b"]")
    refuses(said.replace("jsonl", ending), read_examples, file)


def test_rows_in_memory_with_half_a_character(tmp_path: Path) -> None:
    refuses("data: row 2: it holds half of a surrogate pair", examples_of, [GOOD, {**GOOD, "output": "\ud800"}])
    refuses("data: row 1: it holds half of a surrogate pair", write_rows, ["\udfff"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"instruction": "\\ud83d\\ude00", "output": "\\\\ud800"}\n')
    (example,) = read_examples(file)
    assert (example.instruction, example.outputs) == ("😀", ("\\ud800",))


def test_the_number_of_an_example(tmp_path: Path) -> None:
    file = tmp_path / "RTE" / "test.tsv"
    file.parent.mkdir()
    file.write_text("index\tsentence1\tsentence2\n" + "9" * 5_000 + "\ta\tb\n")
    refuses("test.tsv:2: index '999", read_split, "RTE", "test", tmp_path)
    file.write_text("index\tsentence1\tsentence2\n123456789012345678\ta\tb\n")
    assert read_split("RTE", "test", tmp_path) == [PairExample("a", "b", None, 123456789012345678)]


def test_questions_that_are_nested_or_begin_beyond_every_text(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[" * 28_000)
    refuses("a.json: cannot be read as JSON (nested too deeply", list, _file_rows(file))
    answer = {"text": "a", "answer_start": 10**40}
    question = {"id": "1", "question": "b", "answers": [answer]}
    file.write_text(json.dumps({"data": [{"paragraphs": [{"context": "a", "qas": [question]}]}]}))
    refuses("question 1: expected id, question and context", _checked, _file_rows(file), str(file), "squad1")


def test_hosts_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"node\xff slots=1\n")
    refuses("hosts: not UTF-8 text", read_hosts, tmp_path / "hosts")


def test_answers_with_other_line_separators(tmp_path: Path) -> None:
    answers = ["one\u2028two\u0085three\x1c", "a\u2029b"]
    rows = [{"references": ["x"], "predictions": {"greedy": answer}} for answer in answers]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert json_lines(file) == rows
    assert _chance(file)["above_chance"] in (True, False)


# The disk.


def run_to(folder: Path) -> list[str]:
    return ["--ds_config", "zero2", "--output_dir", str(folder)]


def test_a_file_in_the_place_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmdistill.runtime.distributed.process_group", lambda *_: pytest.fail("the ranks join"))
    file = tmp_path / "file"
    file.write_text("mine")
    for folder, said in (
        (file, f"--output_dir {file}: {file} is a file; give another folder"),
        (file / "a" / "b", f"{file} is a file; give another folder"),
        (tmp_path / ("n" * 400), "--output_dir has the name 'nnn"),
    ):
        assert main(run_to(folder)) == 2
        assert said in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


def test_a_place_where_no_folder_can_be_made_is_met_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmdistill.tasks import answers

    monkeypatch.setattr("llmdistill.runtime.distributed.process_group", lambda *_, **__: pytest.fail("the ranks join"))
    monkeypatch.setattr(answers, "evaluate_model", lambda *_, **__: pytest.fail("the model is loaded"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = ["--model", "embedded:teacher"]
    weighting = ["--student.factorize.weighting", "gradients", "--student.factorize.calibration.folder"]
    made = ["--ds_config", "zero2", "--output_dir", str(tmp_path / "run")]
    commands = {
        "--output_dir": ["train.py", "--ds_config", "zero2", "--output_dir"],
        "--student.factorize.calibration.folder": ["train.py", *made, *weighting],
        "--output": ["evaluate", *model, "--data", "embedded:valid", "--output"],
        "--output_dir of a suite": ["evaluate", "--suite", "speed", *model, "--output_dir"],
        "--output_dir of tasks": ["evaluate", "--suite", "glue", *model, "--output_dir"],
    }
    why = "no such file or directory|operation not permitted|permission denied"  # by place and user
    for place in ("/proc", "/sys"):
        for key, (name, *arguments) in commands.items():
            words = [*arguments, f"{place}/x/y"]
            assert (main(words) if name == "train.py" else llmdistill_command([name, *words])) == 2, key
            said = capsys.readouterr().err
            setting = key.partition(" ")[0]
            found = re.search(rf"error: {setting} {place}/x/y: no folder can be made in {place} \(({why})\)", said)
            assert found, (key, said)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)  # root may write everywhere
    said = f"--output_dir {tmp_path}/a: no folder can be made in {tmp_path} (read-only file system); give"
    refuses(said, check_writable, tmp_path / "a", "--output_dir")


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write() raises it, without a name


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def student() -> None:
        with new_folder(tmp_path / "student") as partial:
            (partial / "model").write_text("half")
            raise full()

    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(full()))
    for call, name in ((student, "student"), (lambda: write_json(tmp_path / "run.json", {}), "run.json")):
        with pytest.raises(UserError, match=r"B of .* are free on the disk at /") as caught:
            call()
        assert str(caught.value).startswith(f"{tmp_path / name}: no space left on device, ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_a_library_says_of_the_disk_is_understood(tmp_path: Path, number: int) -> None:
    words = os.strerror(number)
    with pytest.raises(UserError, match=rf"/student: .*{words.lower()}"), new_folder(tmp_path / "student"):
        raise RuntimeError(f"Error while serializing: I/O error: {words} (os error {number})")
    assert refused_by_system(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None
    assert refused_by_system(ValueError("other")) is None


def test_what_the_system_refuses_is_a_sentence_of_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def job() -> None:
        Path("/", "n" * 400).write_text("x")

    assert exit_code(job) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: /nnn")
    assert said.endswith("the system refuses it (file name too long): choose another path, or fix its permissions\n")
