import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of cached tokens of the test's own."""
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


@pytest.fixture
def word_tokenizer():
    """Makes tokenizers of one token per character, so that lengths can be counted by hand; </s> is 0 and <s> 1."""

    def make(*, with_start: bool = False, with_end: bool = False, chat: bool = False) -> PreTrainedTokenizerFast:
        symbols = ["</s>", "<s>", *(chr(code) for code in range(32, 127)), "\n", "é"]
        backend = Tokenizer(models.WordLevel({symbol: n for n, symbol in enumerate(symbols)}, unk_token="</s>"))
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        single = ("<s> " if with_start else "") + "$A" + (" </s>" if with_end else "")
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("</s>", 0), ("<s>", 1)])
        # The end token is the padding too, as with GPT-2.
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="</s>", bos_token="<s>", pad_token="</s>"
        )
        tokenizer.chat_template = CHAT_TEMPLATE if chat else None
        return tokenizer

    return make
