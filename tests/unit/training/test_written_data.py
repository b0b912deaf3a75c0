"""Data that the teacher of a run writes: one file in place of the word, for the run and for those like it."""

from dataclasses import replace

import pytest
from hostile import refuses

from llmdistill.config import DataConfig, RunConfig, TeacherConfig
from llmdistill.config.generation import WriteConfig
from llmdistill.generation import self_written
from llmdistill.training.written_data import describe_writing, with_written_data


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
