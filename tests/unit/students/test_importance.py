"""Importance of a teacher's parts, and the parts that a smaller student takes by it."""

import copy
from collections import defaultdict
from functools import partial

import pytest
import torch
from tiny import tiny_model
from torch import nn

from llmdistill.batch import Batch
from llmdistill.models.families import base_name, layers_of
from llmdistill.students.importance import important_parts, measure_importance
from llmdistill.students.shapes import initialize, parse_shape, shape_config, teacher_layers

SIZES = {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 30}
WIDTHS = {
    "llama": {"intermediate_size": 96, "num_key_value_heads": 3},
    "gpt2": {"n_inner": 96, "n_positions": 20},
    "bert": {"intermediate_size": 96, "max_position_embeddings": 20},
}
PARTS = {
    "llama": {"value": "self_attn.v_proj", "out": "self_attn.o_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    "gpt2": {"value": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
    "bert": {
        **{"value": "attention.self.value", "out": "attention.output.dense"},
        **{"up": "intermediate.dense", "down": "output.dense"},
    },
}


def teacher_of(kind):
    model = tiny_model(kind, **SIZES, **WIDTHS[kind])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batches(seed=0, count=2):
    """Rows of different lengths, padded on the right and, in the last batch, on the left."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(3, 30, (3, 8), generator=generator)
        mask = (torch.arange(8) < torch.tensor([8, 5, 3])[:, None]).long()
        mask = mask.flip(1) if index == count - 1 else mask
        made.append(Batch(input_ids=ids, attention_mask=mask, labels=torch.full_like(ids, -100)))
    return made


def inputs_and_outputs(model, given):
    """What each module reads and returns, token by token, from runs of one unpadded row at a time in fp64."""
    double, read, returned = copy.deepcopy(model).double(), defaultdict(list), defaultdict(list)

    def keep(name, _, args, output):
        output = output[0] if isinstance(output, tuple) else output
        if args and torch.is_tensor(args[0]) and torch.is_tensor(output) and output.is_floating_point():
            read[name] += list(args[0][0])
            returned[name] += list(output[0])

    for name, module in double.named_modules():
        module.register_forward_hook(partial(keep, name))
    for batch in given:
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            positions = {"position_ids": torch.arange(int(mask.sum()))[None]}
            if mask[0] == 0:  # rows that are padded on the left count positions from the first padding token
                positions["position_ids"] += int((mask == 0).sum())
            with torch.no_grad():
                double(input_ids=ids[mask != 0][None], **positions)
    return {name: (torch.stack(read[name]), torch.stack(returned[name])) for name in read}


@pytest.mark.parametrize("kind", WIDTHS)
def test_importance_is_that_of_a_naive_loop(kind):
    teacher = teacher_of(kind).train()
    found = measure_importance(teacher, batches())
    assert teacher.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())
    seen = inputs_and_outputs(teacher.eval(), batches())
    prefix = {"gpt2": "transformer.h", "bert": "bert.encoder.layer"}.get(kind, "model.layers")
    assert found.tokens == 32 == len(seen[f"{prefix}.0"][0])
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    for layer in range(4):
        into, out = seen[f"{prefix}.{layer}"]
        cosines = (into * out).sum(1) / (into.norm(dim=1) * out.norm(dim=1))
        close(found.influence_L[layer], 1 - cosines.mean())
        contexts = seen[f"{prefix}.{layer}.{PARTS[kind]['out']}"][0].unflatten(1, (6, 8))
        close(found.heads_LH[layer], contexts.square().sum(-1).sqrt().mean(0))
        close(found.contexts_LHD[layer], contexts.abs().mean(0))
        close(found.neurons_LF[layer], seen[f"{prefix}.{layer}.{PARTS[kind]['down']}"][0].abs().mean(0))
    names = [name for name, each in teacher.named_modules() if type(each).__name__.endswith("Norm")]
    assert {base_name(teacher, name) for name in names} == set(found.norms)
    for name in names:
        into, out = seen[name]
        close(found.norms[base_name(teacher, name)], out.abs().mean(0))
        centered = into - into.mean(1, keepdim=True) if kind in ("gpt2", "bert") else into
        close(found.spreads[base_name(teacher, name)], centered.square().mean(0))
    assert (found.scores_LGD is None) == (kind == "llama")
    for layer in range(4) if kind != "llama" else ():
        if kind == "bert":
            query, key = (seen[f"{prefix}.{layer}.attention.self.{name}"][1] for name in ("query", "key"))
        else:
            query, key, _ = seen[f"{prefix}.{layer}.attn.c_attn"][1].split(48, dim=1)
        close(found.scores_LGD[layer].flatten(), (query.square().mean(0) * key.square().mean(0)).sqrt())


# --- planted parts ----------------------------------------------------------------------------------------------------

CHANNELS = [*range(3, 19), *range(30, 46)]
NEURONS = {1: [*range(5, 30), *range(70, 85)], 3: [*range(39), 77]}
HEADS = {1: [0, 2, 3, 5], 3: [1, 2, 3, 4]}
GROUPS = {"llama": {1: [0, 2], 3: [1, 2]}, "gpt2": HEADS, "bert": HEADS}
"""By the layers that stay, which differ in them but share the channels."""


def rows_of(module):
    """The weight as (outputs, inputs)."""
    return module.weight.data if isinstance(module, nn.Linear) else module.weight.data.T


def without(kept, count):
    return [index for index in range(count) if index not in kept]


def silence(module, rows):
    rows_of(module)[rows] = 0
    if module.bias is not None:
        module.bias.data[rows] = 0


def planted(kind):
    """A teacher whose other channels, heads, neurons and layers add nothing, though most of their weights are random.

    LayerNorm subtracts the mean over all channels, so what is written into the channels that stay has the mean zero.
    """
    teacher, names, centered = teacher_of(kind), PARTS[kind], kind in ("gpt2", "bert")
    others = without(CHANNELS, 48)
    per_group = 2 if kind == "llama" else 1
    for module in teacher.base_model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.data[:, others] = 0
            if centered:
                module.weight.data[:, CHANNELS] -= module.weight.data[:, CHANNELS].mean(1, keepdim=True)
        elif getattr(getattr(module, "weight", None), "ndim", 0) == 1 and len(module.weight) == 48:
            module.weight.data[others] = 0
            if kind == "bert":  # its norms write into the residual stream, and dropped layers must not change it
                module.weight.data[CHANNELS] = 0.7
                module.bias.data.zero_()
            elif centered:
                module.bias.data[others] = 0
    for index, block in enumerate(layers_of(teacher)):
        is_kept = index in NEURONS
        groups = without(GROUPS[kind].get(index, []), 6 // per_group)
        features = [group * 8 + feature for group in groups for feature in range(8)]
        silence(block.get_submodule(names["value"]), [96 + row for row in features] if kind == "gpt2" else features)
        silence(block.get_submodule(names["up"]), without(NEURONS.get(index, []), 96))
        if kind == "gpt2" and not is_kept:  # what the norms of dropped layers see must not count
            block.ln_1.bias.data[others] = 9.0
        for name in ("out", "down"):
            writer = block.get_submodule(names[name])
            silence(writer, others if is_kept else list(range(48)))
            if centered and is_kept:
                rows_of(writer)[CHANNELS] -= rows_of(writer)[CHANNELS].mean(0)
                writer.bias.data[CHANNELS] -= writer.bias.data[CHANNELS].mean()
    return teacher


def pruned(teacher, shape):
    importance, wanted = measure_importance(teacher, batches()), parse_shape(shape)
    config = shape_config(teacher.config, wanted)
    layers = teacher_layers("important", wanted.depth, 4, key="student.layers", influence=importance.influence_L)
    parts = important_parts(importance, config, teacher.config, layers)
    student = type(teacher)(config).eval()
    initialize(student, teacher, parts)
    return student, parts


def hidden(model):
    (batch, *_) = batches(seed=5)
    with torch.no_grad():
        states = model.base_model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return states[batch.attention_mask != 0]


@pytest.mark.parametrize("kind", WIDTHS)
def test_planted_parts_are_found_and_do_what_the_teacher_does(kind):
    teacher = planted(kind)
    student, parts = pruned(teacher, "2x32x4x40")
    assert parts.layers == list(NEURONS)
    assert parts.hidden_W.tolist() == CHANNELS
    assert parts.groups_LG.tolist() == list(GROUPS[kind].values())
    assert parts.neurons_LF.tolist() == list(NEURONS.values())
    torch.testing.assert_close(hidden(student), hidden(teacher)[:, CHANNELS], rtol=1e-4, atol=1e-5)
    if kind != "bert":  # the non-linearity in BERT's head does not keep the mean zero
        ids = batches(seed=5)[0].input_ids
        torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=1e-4, atol=1e-4)


def test_narrower_heads_of_rotary_models_keep_the_frequencies():
    teacher = tiny_model("llama", **{**SIZES, "hidden_size": 96}, **WIDTHS["llama"])
    student, parts = pruned(teacher, "4x48x6")  # 8 of 16 features
    assert parts.matched_LGD[0, 0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    whole = teacher.model.rotary_emb.inv_freq
    torch.testing.assert_close(student.model.rotary_emb.inv_freq, whole[parts.matched_LGD[0, 0, :4]])
    student, parts = pruned(teacher, "4x72x6")  # 12 of 16 features: no pair has just these frequencies
    own = student.model.rotary_emb.inv_freq
    nearest = [int((whole.log() - frequency.log()).abs().argmin()) for frequency in own]
    assert parts.matched_LGD[3, 2].tolist() == [*nearest, *(8 + pair for pair in nearest)]


def test_narrower_heads_without_rotary_positions_take_the_features_that_count():
    teacher = teacher_of("bert")
    matched, values = [0, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 7]
    for block in layers_of(teacher):
        attention = block.attention.self
        for head in range(6):
            silence(attention.key, [head * 8 + feature for feature in without(matched, 8)])
            silence(attention.value, [head * 8 + feature for feature in without(values, 8)])
    student, parts = pruned(teacher, "4x36x6")
    assert parts.matched_LGD.tolist() == [[matched] * 6] * 4
    assert parts.values_LGD.tolist() == [[values] * 6] * 4
    own, theirs = student.bert.encoder.layer[2].attention, teacher.bert.encoder.layer[2].attention
    assert torch.equal(own.self.query.bias, theirs.self.query.bias.view(6, 8)[:, matched].flatten())
    kept = theirs.output.dense.weight[parts.hidden_W].view(-1, 6, 8)[..., values].flatten(1)
    assert torch.equal(own.output.dense.weight, kept)
