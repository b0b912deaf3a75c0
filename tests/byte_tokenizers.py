"""Small tokenizers whose tokens are pieces of UTF-8, trained on a few sentences or built by hand."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The cat sat on the mat, and the dog sat on the log.",
    "Name the month after October. It is November.",
    "Der Hund saß auf der Matte. 日本語の文字。 Ünïcödé.",
    "Which town and which day does the note name? The town is Eastmoor and the day is Friday.",
]


def byte_level(size: int, *, texts: list[str] = TEXTS, end: str = "<stop>", start: str | None = None, **settings: str):
    """A byte-level BPE of so many tokens; with `start` each text begins with this token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [end] if start is None else [end, start]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    if start is not None:
        marks = [(start, backend.token_to_id(start))]
        backend.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=marks)
        settings["bos_token"] = start
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end, **settings)


def sentencepiece_like(*, words: str = "▁the ▁a ▁text ▁plain ▁The at og in", end: str = "</s>"):
    """A BPE of bytes and some words as Llama 2 has it: a space before the first word, and bytes as <0x0A>."""
    pieces = [
        "<unk>",
        end,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyzT",
        *words.split(),
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = []
    for word in words.split():
        for place in range(1, len(word)):
            left, right, both = word[:place], word[place], word[: place + 1]
            vocabulary.setdefault(both, len(vocabulary))
            merges.append((left, right))
    backend = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, unk_token="<unk>", pad_token=end)
