"""llmdistill from Python on two ranks: the run of one, split. The file is also the program of a rank."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

import llmdistill
from llmdistill.runtime.distributed import init_distributed

ROWS = [{"prompt": f"Number {i}" + " and" * (i % 5), "completion": f"is {i % 7}"} for i in range(32)]


def main():
    folder, teacher_folder = Path(sys.argv[-2]), sys.argv[-1]
    world = init_distributed()
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder)
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    student, more = llmdistill.compress(teacher, rank=6), {"steps": 3, "log_every": 1, "micro_batch_size": 4}
    result = llmdistill.distill(teacher, student, ROWS, output_dir=folder / "run", global_batch_size=8, **more)
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=4 // world.size,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        learning_rate=1e-3,
    )
    data = {"train_dataset": [tokenizer(row["prompt"]) for row in ROWS]}
    data |= {"data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False)}
    trainer = llmdistill.DistillationTrainer(llmdistill.compress(teacher, rank=6), teacher, arguments, **data)
    trainer.train()
    if world.is_main:
        weights = sum(float(parameter.detach().double().abs().sum()) for parameter in result.student.parameters())
        log = [row for row in trainer.state.log_history if "loss" in row]
        (folder / "result.json").write_text(json.dumps({"history": result.history, "weights": weights, "log": log}))


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(launch, tiny_teacher, tmp_path):
    results = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launch(str(folder), str(tiny_teacher), ranks=ranks, program=__file__)
        results.append(json.loads((folder / "result.json").read_text()))
    one, two = results
    for key, names in (("history", "loss grad_norm hidden"), ("log", "loss grad_norm hidden logits")):
        assert len(one[key]) == len(two[key]) == 3
        for name in names.split():
            assert [row[name] for row in two[key]] == pytest.approx([row[name] for row in one[key]], rel=1e-4), name
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-6)


if __name__ == "__main__":
    main()
