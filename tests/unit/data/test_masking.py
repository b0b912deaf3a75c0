from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hostile import refuses
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.masking import Masking, word_starts

MASK = 4
VOCABULARY = np.arange(5, 50)


def masked(ids, seed=0, **changes):
    settings = {"mask_share": 0.15, "mask_token_id": MASK, "vocabulary": VOCABULARY, "word_starts": None}
    return Masking(**{**settings, **changes})(ids, ids < 5, np.random.default_rng(seed))


def chosen(labels: np.ndarray) -> list[int]:
    return np.flatnonzero(labels != IGNORE_INDEX).tolist()


class TestTokens:
    def test_special_tokens_and_padding_are_never_chosen(self):
        ids = np.array([2, 10, 1, 3, 11, 3, 0, 0])
        ids.setflags(write=False)
        seen: Counter[int] = Counter()
        for seed in range(200):
            shown, labels = masked(ids, seed)
            seen.update(chosen(labels))
            assert (shown[[0, 2, 3, 5, 6, 7]] == ids[[0, 2, 3, 5, 6, 7]]).all()
        assert set(seen) == {1, 4}
        assert min(seen.values()) > 60, "the places are equally likely"

    def test_of_ten_chosen_eight_are_masked_one_is_replaced_and_one_stays(self):
        ids = np.full(40_000, 60)  # not in the vocabulary, so that no replacement is the token itself
        shown, labels = masked(ids, mask_share=0.5)
        shown = shown[chosen(labels)]
        shares = [(shown == MASK).mean(), (shown == 60).mean(), np.isin(shown, VOCABULARY).mean()]
        # Four standard deviations of the share among 20,000.
        assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.012)
        drawn = Counter(shown[np.isin(shown, VOCABULARY)].tolist())
        assert set(drawn) == set(VOCABULARY.tolist()), "every token of the vocabulary is drawn, and none beside it"
        assert max(drawn.values()) < 2 * min(drawn.values())


class TestWholeWords:
    STARTS = np.arange(50) % 2 == 0
    """Even tokens begin a word."""
    IDS = np.array([2, 10, 11, 13, 20, 30, 31, 3, 33, 40, 41, 43, 45, 0])
    TOKENS = ((1, 2, 3), (4,), (5, 6), (8,), (9, 10, 11, 12))
    """What follows a special token begins one too."""

    def test_are_chosen_as_a_whole_until_the_number_is_reached(self):
        alone = set()
        for share in (0.01, 0.3, 0.9):
            number = max(1, round(share * 11))
            for seed in range(60):
                _, labels = masked(self.IDS, seed, mask_share=share, word_starts=self.STARTS)
                places = chosen(labels)
                words = [word for word in self.TOKENS if set(word) & set(places)]
                assert sorted(place for word in words for place in word) == places
                assert len(places) >= number
                assert any(len(places) - len(word) < number for word in words), "no word after the one that crosses it"
                alone |= {*words} if len(words) == 1 else set()
        assert alone == set(self.TOKENS)

    def test_the_parts_of_a_word_are_masked_each_by_its_own_dice(self):
        ids = np.array([10] + [11] * 9999)
        shown, labels = masked(ids, word_starts=self.STARTS)
        assert len(chosen(labels)) == 10_000
        assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.016)


SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel()])
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


@pytest.mark.parametrize(
    ("model", "pre_tokenizer", "normalizer", "starts"),
    [
        (models.WordPiece, pre_tokenizers.BertPreTokenizer(), None, {"<s>", "a", "Ġb", "▁c", "Ċ"}),
        (models.BPE, pre_tokenizers.ByteLevel(), None, {"<s>", "Ġb", "Ċ"}),
        (models.BPE, SPLIT, None, {"<s>", "Ġb", "Ċ"}),
        (models.BPE, pre_tokenizers.Metaspace(), None, {"<s>", "▁c"}),
        (models.BPE, None, PREPEND, {"<s>", "▁c"}),
    ],
    ids=["WordPiece", "byte level", "Llama 3", "sentencepiece", "Llama 2"],
)
def test_word_starts(model, pre_tokenizer, normalizer, starts):
    vocabulary = {token: 2 * number for number, token in enumerate(["<s>", "a", "##d", "Ġb", "▁c", "Ċ"])}
    backend = Tokenizer(model(vocabulary, unk_token="<s>", **({"merges": []} if model is models.BPE else {})))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    found = word_starts(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    assert set(np.flatnonzero(found)) == {vocabulary[token] for token in starts}


def test_word_starts_of_a_tokenizer_in_python():
    vocabulary = {"<s>": 0, "▁c": 1, "d": 2}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, all_special_ids=[0], sp_model=None)
    assert np.flatnonzero(word_starts(tokenizer)).tolist() == [0, 1]
    del tokenizer.sp_model
    refuses("does not mark where words begin", word_starts, tokenizer)
