"""ROUGE of any script: as published for Latin, and by hand-derived words and an own LCS for the others."""

import random

import pytest
from rouge_score.rouge_scorer import RougeScorer

from llmdistill.tasks.rouge import measure_chance, reference_words, rouge_l, rouge_scores
from llmdistill.tasks.words import describe_words, unicode_words

WORDS = {
    "Привет, мир! Всё — й.": ["привет", "мир", "всё", "й"],
    "Η Ελλάδα και ο ΛΌΓΟΣ, ο λόγος.": ["η", "ελλάδα", "και", "ο", "λόγοσ", "ο", "λόγοσ"],
    "مَرْحَبًا بالعالم، ٢٠٢٤": ["مَرْحَبًا", "بالعالم", "٢٠٢٤"],
    'שָׁלוֹם לצה"ל': ["שָׁלוֹם", 'לצה"ל'],
    "नमस्ते दुनिया। हिन्दी": ["नमस्ते", "दुनिया", "हिन्दी"],
    "தமிழ் மொழி": ["தமிழ்", "மொழி"],
    "서울은 대한민국의 수도이다.": ["서울은", "대한민국의", "수도이다"],
    "東京は日本の首都。": ["東", "京", "は", "日", "本", "の", "首", "都"],
    "カードとｶﾞ": ["カ", "ー", "ド", "と", "ｶﾞ"],
    "น้ำ ดี": ["น้ำ", "ดี"],
    "ភាសាខ្មែរ": ["ភា", "សា", "ខ្មែ", "រ"],
    "ລາວ": ["ລ", "າ", "ວ"],
    "我在 Google 用 3.14 don't": ["我", "在", "google", "用", "3.14", "don't"],
    "…!? 🙂 ー": ["ー"],
}
PARTED = {  # of the last token of each text another one is made
    "cyrillic": ("Столица Японии — Токио", "Столица Японии — Киото", 3, 2),
    "greek": ("Η πρωτεύουσα είναι η Αθήνα", "Η πρωτεύουσα είναι η Σπάρτη", 5, 4),
    "arabic": ("عاصمة اليابان هي طوكيو", "عاصمة اليابان هي كيوتو", 4, 3),
    "hebrew": ("בירת יפן היא טוקיו", "בירת יפן היא קיוטו", 4, 3),
    "devanagari": ("जापान की राजधानी टोक्यो", "जापान की राजधानी क्योटो", 4, 3),
    "hangul": ("일본의 수도는 도쿄이다", "일본의 수도는 교토이다", 3, 2),
    "han": ("东京是日本的首都", "东京是日本的城市", 8, 6),
    "kana": ("とうきょうです", "とうきょうかな", 7, 5),
    "thai": ("กทมดี", "กทมดู", 4, 3),
}


@pytest.mark.parametrize("text", WORDS)
def test_the_words_of_a_text(text):
    assert unicode_words(text) == WORDS[text]


def test_one_word_has_one_form():
    composed = "\u0439 Stra\u00dfe \u03bb\u03cc\u03b3\u03bf\u03c2"
    apart = "\u0438\u0306 STRASSE \u039b\u039f\u0301\u0393\u039f\u03a3"
    assert unicode_words(composed) == unicode_words(apart)
    assert rouge_l([apart], [composed]) == 100


@pytest.mark.parametrize("script", PARTED)
def test_a_text_of_any_script_is_scored_by_its_words(script):
    text, other, total, same = PARTED[script]
    assert rouge_l([text], [text]) == 100
    assert rouge_l([other], [[text]]) == pytest.approx(100 * same / total)
    assert rouge_l(["2024"], [text]) == 0


def longest_common(one, other):
    """The length of the longest common subsequence, from its definition."""
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("alphabet", ["東京都日本", "абвг ", "กขคง", "가나다 "])
def test_it_is_the_f1_of_the_longest_common_subsequence(alphabet):
    chance = random.Random(0)
    texts = ["".join(chance.choices(alphabet, k=30)) for _ in range(40)]
    # By hand: words lie between spaces, and in the scripts without any each character is one.
    words = [text.split() if " " in alphabet else list(text) for text in texts]
    for place in range(0, len(texts), 4):
        several = range(place + 1, place + 4)
        expected = max(
            200 * longest_common(words[place], words[n]) / (len(words[place]) + len(words[n])) for n in several
        )
        assert rouge_scores([texts[place]], [[texts[n] for n in several]]) == [pytest.approx(expected)]


LATIN = [
    ("The cats sat on the mats in 2024.", ["A cat sat on a mat.", "Dogs are running"]),
    ("L'été à Zürich, façade", ["l'hiver à Zurich", "façades"]),
    ("Đây là tiếng Việt", ["tiếng Việt là đây"]),
    ("He said 東京", ["He said 東京 once or twice", "Она said so"]),
    ("2024", ["2024", "12"]),
    ("", ["!?"]),
]


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_latin_text_is_scored_as_published(kind):
    predictions, references = zip(*LATIN, strict=True)
    published = RougeScorer([kind], use_stemmer=True)
    expected = [100 * published.score_multi(several, text)[kind].fmeasure for text, several in LATIN]
    assert rouge_scores(predictions, references, kind) == expected
    assert [rouge_scores([text], [several], kind)[0] for text, several in LATIN] == expected


def test_the_references_choose_once_for_a_set():
    assert rouge_l(["東京"], ["Tokyo"]) == 0 == rouge_l(["Tokyo"], ["東京"])
    references = ["столица Японии", "это Tokyo да", "42", "the end"]
    assert reference_words(references) == "unicode"
    assert reference_words([["the capital", "of Japan"], "это Токио", "42 2024 2025"]) == "stemmed"
    # "running" has a stem only as published, and the whole set is scored by Unicode words.
    assert rouge_scores(["runs"] * 4, [*references[:3], "running run"])[3] == 0


def test_chance_is_measured_by_the_words_of_the_set():
    references = [["столица Токио"], ["река длинная"], ["кошка спит"], ["2024 год"]]
    chance = measure_chance([each for (each,) in references], references)
    assert (chance.own, chance.other) == (100, 0)
    assert chance.is_beaten
    assert measure_chance(["2024"] * 4, references).own == pytest.approx(200 / 3 / 4), "and not 25, of numbers alone"


def test_a_teacher_that_answers_nothing_is_at_chance():
    chance = measure_chance([""] * 4, [["a"], ["b"], ["c"], ["d"]])
    assert (chance.own, chance.other, chance.error) == (0, 0, 0)
    assert not chance.is_beaten


def test_reports_name_the_words():
    assert describe_words({}) == describe_words({"a": "stemmed"}) == "F1 with stemming"
    assert describe_words({"a": "unicode"}).startswith("F1 of Unicode words")
    both = describe_words({"a": "stemmed", "b": "unicode", "c": "stemmed"})
    assert both.startswith("F1 with stemming on a and c, F1 of Unicode words")
    assert both.endswith(" on b")
