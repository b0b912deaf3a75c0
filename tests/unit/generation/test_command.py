from __future__ import annotations

import json

from llmdistill.cli import main
from llmdistill.generation.answers_file import read_provenance

LIMITS = ("--max_prompt_length", "60", "--max_length", "70", "--dtype", "fp32", "--engine", "hf")


def test_the_command_writes_answers_and_says_what_to_know(teacher, data, tmp_path, capsys) -> None:
    output = tmp_path / "a.jsonl"
    arguments = ["--model", str(teacher), "--data", str(data), "--output", str(output), "--decoding", "greedy", *LIMITS]
    assert main(["generate", *arguments, "--limit", "3", "--batch_size", "2"]) == 0
    printed = capsys.readouterr().out
    record = read_provenance(output)
    assert len(output.read_text().splitlines()) == 3
    assert f"3 answers of {teacher} ({record['teacher_fingerprint']}) are in {output}" in printed
    assert f"{record['unfinished_answers']} were cut at 10 tokens before their end" in printed
    assert main(["generate", *arguments, "--limit", "3", "--batch_size", "2", "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == record
    assert f"{output} holds these answers already; nothing to do." in again.err
