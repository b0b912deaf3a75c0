"""The language model of a model that sees images too, as a decoder of its own: a teacher of text.

    python scripts/examples/language_model_alone.py --model DIR --output gemma-3-text   # Gemma 3, Qwen-VL, LLaVA, ...

Its logits for a text are compared with those of the whole model before it is saved. Tokenizer, chat template and
generation settings are copied.
"""

# %% The whole model
import argparse
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from llmdistill.models.companions import copy_companions, download

parser = argparse.ArgumentParser(description="Save the language model of a model of images.", allow_abbrev=False)
parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
parser.add_argument("--output", required=True, type=Path, help="the decoder's folder")
given = parser.parse_args([] if "ipykernel" in sys.modules else None)  # a notebook has no command line

folder = download(given.model)
whole = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", use_safetensors=True).eval()

# %% The config of its language model: in Qwen-VL that of Qwen, whose tokens have one position in place of three
ALONE = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
config = whole.config.get_text_config()
if config.model_type in ALONE:
    settings = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    rope = settings.get("rope_parameters") or {}
    settings["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    config = AutoConfig.for_model(ALONE[config.model_type], **settings)
head = whole.get_output_embeddings()
config.tie_word_embeddings = head.weight is whole.get_input_embeddings().weight

# %% The decoder with the same weights, and what it says of a text
model = AutoModelForCausalLM.from_config(config, dtype=whole.dtype).eval()
model.base_model.load_state_dict(whole.get_decoder().state_dict())
model.get_output_embeddings().load_state_dict(head.state_dict())
tokens = torch.arange(min(64, config.vocab_size))[None]
with torch.no_grad():
    logits, expected = (each(input_ids=tokens).logits.float() for each in (model, whole))
difference = float((logits - expected).abs().max() / expected.abs().max())
if not difference <= (1e-4 if whole.dtype == torch.float32 else 3e-2):
    raise SystemExit(f"the logits of the language model alone differ by {difference:.1%}: it is not saved")

# %% A folder, which is the teacher of a run
model.save_pretrained(given.output)
copy_companions(folder, given.output)
template = folder / "chat_template.json"  # of an older processor
if template.is_file():
    shutil.copy2(template, given.output)
print(f"{given.output}: {type(model).__name__}, {model.num_parameters():,} of {whole.num_parameters():,} parameters")
