"""Tiny tasks in the files of GLUE and a text, of the words yes, no, maybe and w0 to w11."""

from pathlib import Path

import torch

TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "yes", "no", "maybe", *(f"w{n}" for n in range(12))]


def noise(generator: torch.Generator, count: int) -> list[str]:
    return [f"w{int(n)}" for n in torch.randint(12, (count,), generator=generator)]


def write_text(file: Path) -> Path:
    """Forty documents of eight lines; returns the file."""
    lines = [" ".join(TOKENS[5 + (7 * line + word) % 15] for word in range(9)) for line in range(320)]
    documents = ["\n".join(lines[start : start + 8]) for start in range(0, len(lines), 8)]
    file.write_text("\n\n".join(documents), encoding="utf-8")
    return file


def write_task(folder: Path, task: str, sizes: dict[str, int], *, seed: int = 0) -> None:
    """A split's file for each of `sizes`: what is right follows from one word of the first sentence."""
    generator = torch.Generator().manual_seed(seed)
    labels = {
        "RTE": {"yes": "entailment", "no": "not_entailment"},
        "CoLA": {"yes": "1", "no": "0"},
        "SST-2": {"yes": "1", "no": "0"},
        "STS-B": {"yes": "5.0", "maybe": "2.5", "no": "0.0"},
        "MNLI": {"yes": "entailment", "maybe": "neutral", "no": "contradiction"},
    }[task]
    for split, size in sizes.items():
        rows = []
        for number in range(size):
            word = list(labels)[int(torch.randint(len(labels), (), generator=generator))]
            count = 1 + int(torch.randint(6, (), generator=generator))
            first, second = noise(generator, count), noise(generator, 2)
            first[int(torch.randint(count, (), generator=generator))] = word
            trials = [str(number), " ".join(first), " ".join(second), labels[word]]
            rows.append([number, trials[1]] if task == "CoLA" and split == "test" else trials)
            if task == "CoLA" and split != "test":
                rows[-1] = ["source", labels[word], "", trials[1]]
            if task == "SST-2":
                rows[-1] = [trials[1], labels[word]]
        label = {"STS-B": "score", "MNLI": "gold_label"}.get(task, "label")
        header = ["sentence", label] if task == "SST-2" else ["index", "sentence1", "sentence2", label]
        if task == "CoLA":
            header = ["index", "sentence"] if split == "test" else []
        lines = ["\t".join(map(str, row)) + "\n" for row in ([header] if header else []) + rows]
        (folder / task).mkdir(parents=True, exist_ok=True)
        (folder / task / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
