"""What a checkpoint holds, against the tensors of the model that was saved."""

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_model

from llmdistill.config import FactorizeConfig
from llmdistill.report.weights_on_disk import EMBEDDINGS, FACTORS, OTHERS, Checkpoint, read_checkpoint
from llmdistill.students.convert import factorize
from llmdistill.students.sizes import plan_factors

MODELS = {
    # The modules that are embeddings or belong to the head, from the model's own structure.
    "bert": lambda model: [model.bert.embeddings],
    "gpt2": lambda model: [model.transformer.wte, model.transformer.wpe],
    # Its layers are in a module called decoder, as heads of encoders are.
    "opt": lambda model: [model.model.decoder.embed_tokens, model.model.decoder.embed_positions],
}


def saved(model, folder) -> Checkpoint:
    model.save_pretrained(folder)
    found = read_checkpoint(folder)
    assert found.size == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return found


def held(*modules: torch.nn.Module) -> int:
    """The bytes of the parameters."""
    return sum(each.nbytes for module in modules for each in module.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_embeddings_and_of_others(tmp_path, name: str) -> None:
    model = tiny_model(name, **({"word_embed_proj_dim": 16, "tie_word_embeddings": True} if name == "opt" else {}))
    found = saved(model, tmp_path)
    assert found.parts[EMBEDDINGS] == held(*MODELS[name](model))
    assert found.parts[FACTORS] == 0
    assert sum(found.parts.values()) == held(model) == 4 * sum(found.formats.values())
    assert found.number_format == "fp32"


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("svd", FactorizeConfig(rank=4)),
        ("svd", FactorizeConfig(rank=4, form="pivoted")),
        ("kronecker", FactorizeConfig(shapes={"*": "8x4"}, embedding_columns=4)),
    ],
    ids=["svd", "pivoted", "kronecker"],
)
def test_factors_and_their_format(tmp_path, method: str, settings: FactorizeConfig) -> None:
    model = tiny_model("llama", hidden_size=32, intermediate_size=48, tie_word_embeddings=False).to(torch.bfloat16)
    factorize(model, plan_factors(model, settings, method))
    found = saved(model, tmp_path)
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    orders = [each for each in model.buffers() if each.dtype == torch.int64]  # of the rows, in the pivoted form
    whole = held(model) + sum(each.nbytes for each in orders)
    assert found.parts[OTHERS] == held(*norms)
    assert found.parts[EMBEDDINGS] == held(model.get_input_embeddings(), model.get_output_embeddings())
    assert found.parts[FACTORS] == whole - found.parts[EMBEDDINGS] - found.parts[OTHERS] > 0
    pivots = {"I64": sum(each.numel() for each in orders)} if settings.form == "pivoted" else {}
    assert found.formats == {"BF16": model.num_parameters(), **pivots}
    shares = ", ".join(f"{name} {size / whole:.0%}" for name, size in found.parts.items())
    assert found.summary == f"bf16{' and int64' if pivots else ''}: {shares}"


def test_several_files_and_formats(tmp_path) -> None:
    """The most frequent format comes first, however wide it is."""
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(40, 5, dtype=torch.int8)}, tmp_path / "a.safetensors")
    rest = {"model.embed_tokens.weight": torch.zeros(20, 5), "scale": torch.zeros(10, dtype=torch.float16)}
    adapter = {"layers.0.q_proj.lora_A.weight": torch.zeros(3, dtype=torch.float8_e4m3fn)}
    save_file({**rest, **adapter}, tmp_path / "b.safetensors")
    found = read_checkpoint(tmp_path)
    assert found.formats == {"I8": 200, "F32": 100, "F16": 10, "F8_E4M3": 3}
    assert found.number_format == "int8 and fp32 and fp16 and F8_E4M3"
    assert found.parts == {EMBEDDINGS: 400, FACTORS: 3, OTHERS: 220}
