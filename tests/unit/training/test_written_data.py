"""Data that the teacher of a run writes: one file in place of the word, for the run and for those like it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostile import refuses

from llmdistill.config import DataConfig, FactorizeConfig, RunConfig, StudentConfig, TeacherConfig
from llmdistill.config.generation import WriteConfig
from llmdistill.config.student import CalibrationConfig
from llmdistill.generation import self_written
from llmdistill.studies import distillation
from llmdistill.train import main
from llmdistill.training import assemble, cost, disk
from llmdistill.training.run_folder import claim_folder
from llmdistill.training.written_data import describe_writing, with_written_data, written_settings


def test_a_run_reads_what_its_teacher_has_written_once(tmp_path, monkeypatch):
    write = WriteConfig(rows=3, max_text_tokens=8, engine="hf")
    data = DataConfig(kind="text", train="real.txt=2,teacher=1", write=write, cache_dir=str(tmp_path))
    config = RunConfig(teacher=TeacherConfig(model="embedded:teacher"), data=data)
    assert with_written_data(config, write=False) is config
    assert describe_writing(config) == "the teacher first writes 3 texts of up to 24 tokens (data.write)"
    written = with_written_data(config)
    [file] = (tmp_path / "written").glob("*.jsonl")
    assert written.data.train == f"real.txt=2,{file}=1"
    assert len(file.read_text().splitlines()) == 3
    monkeypatch.setattr(self_written, "load_model", lambda *_, **__: pytest.fail("written again"))
    other = replace(config, seed=5, data=replace(data, write=replace(write, batch_size=2)))
    assert with_written_data(other).data.train == written.data.train
    assert str(file) in describe_writing(config)
    chats = replace(config, data=replace(data, kind="instructions", train="teacher"))
    refuses("embedded:teacher cannot write instructions, because its tokenizer has no chat", with_written_data, chats)


def test_more_rows_go_on_from_those_that_are_written(tmp_path, monkeypatch):
    def write(cache: str, rows: int, **other) -> bytes:
        settings = WriteConfig(rows=rows, max_text_tokens=8, engine="hf", batch_size=2, **other)
        data = DataConfig(kind="text", train="teacher", write=settings, cache_dir=str(tmp_path / cache))
        config = with_written_data(RunConfig(teacher=TeacherConfig(model="embedded:teacher"), data=data))
        return Path(str(config.data.train)).read_bytes()

    real, sampled = self_written._sample, []

    def counted(job, sampler, prompts, numbers, **more):
        sampled.extend(numbers)
        return real(job, sampler, prompts, numbers, **more)

    monkeypatch.setattr(self_written, "_sample", counted)
    whole = write("whole", 9)
    first, sampled = max(sampled), []
    three, few = write("cache", 3), [*sampled]
    assert write("cache", 9) == whole
    assert whole.startswith(three)
    assert sampled == list(range(first + 1)), "no row is sampled twice"
    assert 2 < len(few) < first
    monkeypatch.setattr(self_written, "load_model", lambda *_, **__: pytest.fail("written again"))
    assert write("cache", 5) == b"".join(whole.splitlines(keepends=True)[:5])
    assert write("cache", 3) == three
    with pytest.raises(pytest.fail.Exception):
        write("cache", 3, seed=1)


@pytest.mark.parametrize(("calibration", "write", "rows"), [
    ({"examples": 12}, {}, 13),
    ({"examples": 12, "held_out": 5}, {}, 17),
    ({}, {}, 128 + 16),  # 65,536 tokens of rows of 512
    ({"examples": 12}, {"rows": 7}, 7),
])  # fmt: skip
def test_a_teacher_writes_no_more_than_its_calibration_reads(calibration, write, rows):
    factorize = FactorizeConfig(calibration=CalibrationConfig(data="teacher", **calibration))
    data = DataConfig(train="rows.jsonl", write=WriteConfig(**write))
    config = RunConfig(student=StudentConfig(factorize=factorize), data=data)
    settings = written_settings(config)
    assert (settings.rows, settings.unfinished) == (rows, "keep")
    trains = replace(config, data=replace(data, train="teacher"))
    assert written_settings(trains) == data.write


def test_a_run_says_what_it_will_take_before_its_teacher_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(cost, "_SOON", 0)
    monkeypatch.setattr(cost, "_LITTLE", 0)
    monkeypatch.setattr(distillation, "run_chain", lambda *_, **__: None)
    settings = (
        "--method kd --train.steps 7 --student.factorize.target_params 40% --data.kind text --data.train teacher "
        "--data.text.field output --data.valid embedded:valid --data.write.rows 3 --data.write.max_text_tokens 8"
    )
    command = [*settings.split(), "--output_dir", str(tmp_path / "run"), "--data.cache_dir", str(tmp_path / "cache")]
    assert main(command) == 0
    labels = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert labels == ["Recipe", "Cost", "Before"]
    assert main(command) == 0
    assert "Before" not in capsys.readouterr().out


def test_a_folder_of_another_run_is_refused_before_the_teacher_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def begin(plans, *_, **__):
        with claim_folder(plans[-1].recorded, may_go_on=True):
            pass

    monkeypatch.setattr(distillation, "run_chain", begin)

    def start(*words: str) -> int:
        settings = "--method kd --student.factorize.target_params 40% --data.train teacher --data.write.rows 3"
        texts = "--data.kind text --data.text.field output --data.valid embedded:valid --data.write.max_text_tokens 8"
        places = ["--output_dir", str(tmp_path / "run"), "--data.cache_dir", str(tmp_path / "cache")]
        return main([*settings.split(), *texts.split(), *places, *words])

    assert start() == 0
    monkeypatch.setattr(self_written, "load_model", lambda *_, **__: pytest.fail("written before the refusal"))
    for other, said in {
        ("--data.write.rows", "4"): "data.write.rows was 3 and is now 4",
        ("--kd.temperature", "2"): "kd.temperature was 1.0 and is now 2.0",
        ("--seed", "5"): "seed was 0 and is now 5",
        ("--resume", "never"): "it holds a run already, and resume is never",
    }.items():
        assert start(*other) == 2
        assert said in capsys.readouterr().err
    assert start("--train.steps", "100000") == 0, "a run may get more steps"
    new = ["--output_dir", str(tmp_path / "new"), "--data.write.rows", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "has_compiler", lambda: False)
        assert start(*new, "--ds_config", "zero2_offload") == 2
        assert "no C++ compiler was found" in capsys.readouterr().err
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert start(*new) == 2
    assert "has 1.0 kB free" in capsys.readouterr().err
