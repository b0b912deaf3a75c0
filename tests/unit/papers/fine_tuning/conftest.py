"""A tiny encoder, tiny tasks in GLUE's format, and an engine without DeepSpeed (which tests/dist has)."""

import json
from contextlib import nullcontext

import pytest
import torch
from glue_tasks import TOKENS, write_task
from plain_engine import PlainEngine
from word_models import save_bert, save_tokenizer

from llmdistill.commands.fine_tuning import main
from llmdistill.papers.fine_tuning import run
from llmdistill.runtime.distributed import World
from llmdistill.runtime.engine import parameter_groups
from llmdistill.training import assemble


class Engine(PlainEngine):
    """Counts how often it is built."""

    built = 0

    def __init__(self, model, ds_config, settings):
        type(self).built += 1
        optimizer = torch.optim.AdamW(parameter_groups(model, settings.weight_decay), betas=settings.betas)
        super().__init__(model.train(), optimizer, accumulation=ds_config["gradient_accumulation_steps"])


@pytest.fixture(scope="module")
def in_process():
    """Runs use the engine above, in this process alone."""
    world = World(rank=0, size=1, device=torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "build_engine", Engine)
        patch.setattr(run, "process_group", lambda: nullcontext(world))
        yield


@pytest.fixture
def engine(in_process: None) -> type[Engine]:
    Engine.built = 0
    return Engine


QUICK = ["--protocol", "custom", "--learning_rates", "1e-2", "--epochs", "4", "--batch_size", "16", "--speed", "false"]


@pytest.fixture(scope="module")
def fine_tune(in_process, data):
    return lambda output, *more: main(["--data_dir", str(data), "--output_dir", str(output), *QUICK, *map(str, more)])


@pytest.fixture
def evaluate(capsys, engine, encoder, fine_tune, tmp_path):
    """Run the command; gives results.json and what was said."""

    def run(*arguments, model=encoder, folder="out", code=0):
        output = tmp_path / folder
        assert fine_tune(output, "--model", model, *arguments) == code
        said = capsys.readouterr()
        results = json.loads((output / "results.json").read_text()) if code == 0 else {}
        return results, said.out + said.err

    return run


def save_encoder(folder, *, width=16, layers=2, words=TOKENS):
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 2 * width}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1)
    save_bert(folder, words, initializer_range=0.1, **sizes, **dropout)
    save_tokenizer(folder, words, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A random BERT of two layers with a masked-word head."""
    return save_encoder(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture(scope="session")
def make_encoder(tmp_path_factory):
    return lambda **settings: save_encoder(tmp_path_factory.mktemp("models") / "other", **settings)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """GLUE's folders of four small tasks; RTE and MNLI have test files."""
    folder = tmp_path_factory.mktemp("glue")
    write_task(folder, "RTE", {"train": 96, "dev": 41, "test": 7})
    write_task(folder, "CoLA", {"train": 32, "dev": 30})
    write_task(folder, "STS-B", {"train": 96, "dev": 30})
    mnli = {"train": 32, "dev_matched": 30, "dev_mismatched": 20, "test_matched": 5, "test_mismatched": 6}
    write_task(folder, "MNLI", mnli)
    return folder
