"""The tokens that begin a text: what each kind of tokenizer says of them."""

import pytest
from byte_tokenizers import byte_level
from tokenizers import processors
from word_models import word_tokenizer

from llmdistill.data.begin import begin_tokens

BY_VARIABLE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
SPELLED_OUT = "{% for m in messages %}<begin>user {{ m.content }}{% endfor %}"


def tokenizer(**settings):
    """A byte-level BPE that knows <begin> and puts it nowhere by itself."""
    found = byte_level(300, start="<begin>", **settings)
    found.backend_tokenizer.post_processor = processors.ByteLevel()
    return found


@pytest.mark.parametrize(
    ("made", "begins"),
    [
        (byte_level(300), False),
        (tokenizer(), False),
        (byte_level(300, start="<begin>"), True),
        (tokenizer(chat_template=BY_VARIABLE), True),
        (tokenizer(chat_template=SPELLED_OUT), False),
        (tokenizer(chat_template="{{ raise_exception('no') }}"), False),
        (byte_level(300, start="<begin>", add_bos_token=True), True),
    ],
    ids=["none", "known", "puts it", "template", "spelled out", "no template", "adds it"],
)
def test_a_text_begins_as_the_tokenizer_says(made, begins, tmp_path):
    expected = [made.convert_tokens_to_ids("<begin>")] if begins else []
    assert begin_tokens(made) == expected
    made.save_pretrained(tmp_path)
    assert begin_tokens(type(made).from_pretrained(tmp_path)) == expected


def test_the_attribute_speaks_for_a_tokenizer_that_adds_nothing():
    found = tokenizer()
    found._add_bos_token = True
    assert begin_tokens(found) == [found.bos_token_id]


def test_several_tokens_begin_a_text_and_those_of_an_encoder_none():
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[gMASK]", "<sop>", "a"]
    encoder = word_tokenizer(vocabulary)
    assert begin_tokens(encoder) == []
    two = word_tokenizer(vocabulary, marked=False)
    marks = [(mark, vocabulary.index(mark)) for mark in ("[gMASK]", "<sop>")]
    two.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=marks
    )
    assert begin_tokens(two) == [3, 4]


def test_the_first_word_may_be_another_token_behind_the_begin_token():
    class Spacing:
        """Puts a space before the first word only where nothing else begins the text."""

        bos_token_id, all_special_ids = 1, [1]

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1, 7] if add_special_tokens else [8]}

    assert begin_tokens(Spacing()) == [1]
