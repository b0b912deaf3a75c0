"""Reads models in whose JSON files one value is replaced, each key by each of many values nobody meant.

    python scripts/torture/configs.py                       # all models, about ten minutes on one core
    python scripts/torture/configs.py --model llama         # one of them, or any other of tests/tiny.py
    python scripts/torture/configs.py --model llama --key hidden_act --trace

The only outcomes are a model that is loaded and computes, and one UserError that names the file, within a few seconds.
Anything else is a finding. Exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

VALUES: list[Any] = [
    *(None, -1, 0, 3, 10**9, 10**30, 0.5, float("nan"), True, False),
    *("x", "", "9" * 5000, [], [1], [None], {}, {"a": {"b": 1}}),
]
SECONDS = 10
"""A case that takes longer is a finding."""
MEMORY = 16 * 10**9
"""Bytes of addresses of this process: a size that is taken at its word fails instead of filling the machine."""


def models(folder: Path, *others: str) -> dict[str, Path]:
    """Make a tiny model of each kind, and of other architectures; returns their folders by name."""
    import torch
    from peft import LoraConfig, get_peft_model
    from tiny import random_student, save_decoder, tiny_config, tiny_model
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from llmdistill.config.student import QuantizeConfig
    from llmdistill.models.quantized import quantize

    plain = dict.fromkeys(["gpt2", "bert", "qwen3_moe", *others])
    made = {name: folder / name for name in ("llama", *plain, "svd", "kronecker", "int8")}
    save_decoder(made["llama"], num_hidden_layers=2)
    for name in plain:
        tiny_model(name).save_pretrained(made[name])
    svd = {"rank": 3, "embedding_rank": 4}
    random_student(AutoModelForCausalLM, tiny_config("llama"), svd).save_pretrained(made["svd"])
    kronecker = {"shapes": {"*": "4x4"}, "embedding_columns": 2}
    random_student(AutoModelForMaskedLM, tiny_config("bert"), kronecker).save_pretrained(made["kronecker"])
    few_bits = random_student(AutoModelForCausalLM, tiny_config("llama"), {"rank": 3})
    quantize(few_bits, QuantizeConfig(weights="int8"))
    few_bits.save_pretrained(made["int8"])
    generation = {
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "do_sample": True, "num_beams": 1, "repetition_penalty": 1.1},
        **{"eos_token_id": [1, 2], "pad_token_id": 1, "bos_token_id": 0, "max_length": 40, "max_new_tokens": 5},
    }
    (made["llama"] / "generation_config.json").write_text(json.dumps(generation))
    made["adapter"] = folder / "adapter"
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(made["llama"])
    get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(made["adapter"])
    about = json.loads((made["adapter"] / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = "../llama"
    (made["adapter"] / "adapter_config.json").write_text(json.dumps(about))
    return made


FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "generation_config.json")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value below a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    block = value
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = new
    return value


def read(folder: Path) -> None:
    """Read a model as the commands do, and compute with it."""
    import torch

    from llmdistill.config import FactorizeConfig
    from llmdistill.models.companions import copy_generation_settings
    from llmdistill.models.configs import load_config
    from llmdistill.models.families import has_family, max_positions, shape_of
    from llmdistill.models.load import load_model
    from llmdistill.models.tokenizer import brings_tokenizer, load_tokenizer
    from llmdistill.students.sizes import summarize

    config = load_config(folder)
    if has_family(config):
        shape_of(config)
    max_positions(config, 64)
    if brings_tokenizer(folder):
        load_tokenizer(folder)("Where is it?")
    if getattr(config, "quantization_config", None) is None:
        summarize(config, FactorizeConfig(rank=2))
    model = load_model(folder, dtype=torch.float32)
    copy_generation_settings(model, folder)
    with torch.no_grad():
        model.train()(input_ids=torch.tensor([[3, 4, 5]]))


class TooSlow(BaseException):
    """No Exception, which the package would turn into a sentence about the config."""


def outcome(call: Callable[[Path], Any], folder: Path, *, trace: bool = False) -> tuple[str | None, str | None]:
    """Return the sentence by which a case is refused, and what is wrong with its outcome; None for neither."""
    from llmdistill.errors import UserError

    def hang(*_: object) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of its own time: busy cores are no finding
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(folder)
    except UserError as error:
        named = str(folder) in str(error) or any(name in str(error) for name in FILES)
        return str(error), None if named else f"no file is named: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)
        own = [each for each in where if "/llmdistill/" in each.filename]
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        if trace:
            traceback.print_exception(error)
        return None, f"{type(error).__name__} at {at}: {str(error)[:160]!r}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None, None


def cases(folder: Path) -> Iterator[tuple[Path, tuple[Any, ...], Any, Any]]:
    """Each file, the path of a value in it, the value that replaces it, and the whole new content."""
    for name in FILES:
        file = folder / name
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            for path in places(content):
                for value in VALUES:
                    yield file, path, value, replaced(content, path, value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="this one alone")
    parser.add_argument("--key", help="keys whose dotted name contains this")
    parser.add_argument("--trace", action="store_true", help="print the tracebacks of findings")
    parser.add_argument("--say", action="store_true", help="print each sentence")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = Path(tempfile.mkdtemp(prefix="configs-"))
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        from tiny import SETTINGS

        made = models(folder, *({arguments.model} & (SETTINGS.keys() - {"llama"})))
    if arguments.model not in (None, *made):
        parser.error(f"no such model: {arguments.model}")
    tried = refused = found = 0
    slowest = 0.0
    for name, original in made.items():
        if arguments.model not in (None, name):
            continue
        for file, path, value, content in cases(original):
            dotted = ".".join(map(str, path))
            if arguments.key is not None and arguments.key not in dotted:
                continue
            work = original.with_name("work")
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(original, work)
            (work / file.name).write_text(json.dumps(content), encoding="utf-8")
            begun = time.process_time()
            said, wrong = outcome(read, work, trace=arguments.trace)
            slowest = max(slowest, time.process_time() - begun)
            tried, refused, found = tried + 1, refused + (said is not None), found + (wrong is not None)
            case = f"{name} {file.name} {dotted} = {json.dumps(value)[:40]}"
            if wrong is not None:
                print(f"{case}: {wrong}", flush=True)
            elif arguments.say and said is not None:
                print(f"{case}: {said}", flush=True)
    print(f"{tried} cases, {refused} refused, {found} findings; the slowest took {slowest:.1f} s")
    shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
