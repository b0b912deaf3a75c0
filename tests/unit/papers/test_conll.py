"""The format of CoNLL-2000, and the spans that are drawn of it."""

from collections import Counter

from hostile import refuses

from llmdistill.papers.conll import Located, Sentence, Span, draw_spans, read_sentences

# The first words of the example on the task's page, with a chunk that follows another of its type.
TEXT = """He PRP B-NP
reckons VBZ B-VP
the DT B-NP
current JJ I-NP
deficit NN I-NP
today NN B-NP
. . O


Yes UH O
, , O
in IN B-PP
"""


def test_a_sentence_is_cut_into_its_chunks_and_what_is_between(tmp_path):
    file = tmp_path / "train.txt"
    for ending in ("", "\n", "\n\n"):
        file.write_text(TEXT + ending)
        assert read_sentences(file) == [
            Sentence(
                words=("He", "reckons", "the", "current", "deficit", "today", "."),
                spans=(Span(0, 0, "NP"), Span(1, 1, "VP"), Span(2, 4, "NP"), Span(5, 5, "NP"), Span(6, 6, "O")),
                line=1,
            ),
            Sentence(words=("Yes", ",", "in"), spans=(Span(0, 1, "O"), Span(2, 2, "PP")), line=10),
        ]
    for text, said in (
        ("He PRP B-NP\nis VBZ B-VP\nhere RB\n", ": 2 fields, expected word, part of speech and chunk tag"),
        ("He PRP B-NP\nis VBZ B-VP\nhere RB I-NP\n", ": chunk tag I-NP after B-VP: a chunk begins with"),
        ("He PRP B-NP\n\nHe PRP I-NP\n", ": chunk tag I-NP after O"),
    ):
        file.write_text(text)
        refuses(f"train.txt:3{said}", read_sentences, file)


def test_spans_are_drawn_once_each_of_both_kinds_and_by_the_seed():
    spans = [Located(n, Span(n, n, label)) for n, label in enumerate(["NP", "O", "VP", "O", "PP"] * 20)]
    drawn = draw_spans(spans, chunks=30, unlabeled=10, seed=3)
    assert len(set(drawn)) == len(drawn) == 40
    assert set(drawn) <= set(spans)
    labels = Counter(each.span.label for each in drawn)
    assert labels.pop("O") == 10
    assert set(labels) == {"NP", "VP", "PP"}
    # The end is held out, so both kinds must be spread over the list.
    assert 0 < sum(each.span.label == "O" for each in drawn[-20:]) < 10
    assert drawn == draw_spans(spans, chunks=30, unlabeled=10, seed=3)
    assert set(drawn) != set(draw_spans(spans, chunks=30, unlabeled=10, seed=4))
    assert len(draw_spans(spans, chunks=999, unlabeled=0, seed=0)) == 60
