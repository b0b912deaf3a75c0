"""A batch of a student's tokens in the tokens of a teacher with another tokenizer."""

import pytest
import torch
from byte_tokenizers import byte_level, sentencepiece_like
from tiny import tiny_model

from llmdistill.batch import IGNORE_INDEX, Batch, OtherTokens
from llmdistill.data.chat_messages import Turn
from llmdistill.data.collate import Encoded, collate, collate_packed, sample_id
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode, parts_before
from llmdistill.data.token_bytes import TokenBytes
from llmdistill.methods.kd import KdConfig, build_kd
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.teachers.translated import TranslatedTeacher, Translation, describe_shares

STUDENT = byte_level(290)
TEACHERS = {
    "byte-level": byte_level(420, end="</end>", start="<begin>"),
    "sentencepiece": sentencepiece_like(),
}
PAIRS = [
    ("The cat sat", "on the mat, and the dog"),
    ("日本語の", "文字。 Ünïcödé 🙂!"),
    ("Name the month after October.", "It is November."),
    ("", "a"),
]


def encoded(prompt: str, answer: str) -> Encoded:
    ids = [STUDENT(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)]
    return Encoded(ids[0], [*ids[1], STUDENT.eos_token_id])


def translation(teacher, *, prompts=True, longest=100, pairs=PAIRS) -> Translation:
    """The prompts of the teacher are by the id of the student's, each with two words of its own before it."""
    asked = {sample_id(encoded(*pair).prompt_ids): teacher(f"You ask: {pair[0]}")["input_ids"] for pair in pairs}
    return Translation(STUDENT, teacher, prompts=asked if prompts else None, longest=longest)


def batch_of(pairs=PAIRS) -> Batch:
    return collate([encoded(*pair) for pair in pairs], STUDENT.pad_token_id).with_positions(shift=True)


def texts_of_spans(batch: Batch, teacher_batch: Batch, others: OtherTokens, teacher) -> list[tuple[bytes, bytes]]:
    """What stands in each pair and in each span, in the student's and in the teacher's tokens; ends as `END`."""
    ours, theirs = TokenBytes(STUDENT), TokenBytes(teacher)

    def text(tokens: TokenBytes, ids: torch.Tensor) -> bytes:
        return b"".join(b"END" if index in tokens.ends else tokens.pieces[index] for index in ids.tolist())

    labels = batch.row_labels(shift=True)
    found = [
        (text(ours, labels[n : n + 1]), text(theirs, others.labels[m : m + 1]))
        for n, m in enumerate(others.pairs.tolist())
        if m >= 0
    ]
    for span in range(others.num_spans):
        found.append(
            (text(ours, labels[others.student_spans == span]), text(theirs, others.labels[others.spans == span]))
        )
    assert torch.equal(others.labels, teacher_batch.with_positions(shift=True).row_labels(shift=True))
    return found


@pytest.mark.parametrize("name", TEACHERS)
def test_each_span_has_the_same_text_on_both_sides_and_begins_at_its_first_row(name):
    batch, teacher = batch_of(), TEACHERS[name]
    teacher_batch, others = translation(teacher)(batch)
    found = texts_of_spans(batch, teacher_batch, others, teacher)
    # sentencepiece has a space before the first word of a text.
    assert all(one == other or one == other.removeprefix(b" ") for one, other in found)
    assert b"".join(one for one, _ in found).count(b"END") == len(PAIRS)
    compared = (others.pairs >= 0) ^ (others.student_spans >= 0)
    assert compared.all()
    assert len(compared) == len(batch.label_positions)
    assert (others.pairs >= 0).any()
    assert others.num_spans > 3
    for span in range(others.num_spans):
        rows, theirs = ((each == span).nonzero()[:, 0] for each in (others.student_spans, others.spans))
        assert others.starts[rows].tolist() == [theirs[0], *[-1] * (len(rows) - 1)]
    assert (others.starts[others.student_spans < 0] == -1).all()
    for ids_T, mask_T, (prompt, answer) in zip(
        teacher_batch.input_ids, teacher_batch.attention_mask, PAIRS, strict=True
    ):
        asked_for = teacher(f"You ask: {prompt}")["input_ids"]
        expected = [*asked_for, *TokenBytes(teacher).encode(answer), teacher.eos_token_id]
        assert ids_T[mask_T == 1].tolist() == expected


def test_of_a_conversation_the_teacher_reads_its_own_chat_template():
    """What it reads around the answers is its own, and the labels of both are the answers."""
    student, teacher = byte_level(290), byte_level(420, end="</end>", start="<begin>")
    turns = "{% for m in messages %}USER{{ m.content }}ENDS{% endfor %}"
    user = "{% if m.role == 'user' %}WORD{{ '\n' }}{% endif %}"
    student.chat_template = turns.replace("USER", user.replace("WORD", "Q:")).replace("ENDS", "<stop>")
    teacher.chat_template = "<begin>" + turns.replace("USER", user.replace("WORD", "Please say")).replace(
        "ENDS", "</end>"
    )
    questions = ("The cat sat", "Name the month after October."), ("And which day?",)
    chats = [
        [turn for text in asked for turn in (Turn("user", text), Turn("assistant", f"The {text}"))]
        for asked in questions
    ]
    examples = [Example("", "", (chat[-1].content,), messages=tuple(chat[:-1])) for chat in chats]
    ours, theirs = (encode(examples, each, Limits(prompt="chat")).items for each in (student, teacher))
    prompts = {}
    for our, their in zip(ours, theirs, strict=True):
        prompts |= dict(zip(parts_before(our), parts_before(their).values(), strict=True))
    assert len(prompts) == 3
    for batch in (collate(ours, 0), collate_packed(ours, 0, max_length=400)):
        teacher_batch, others = Translation(student, teacher, prompts=prompts, longest=300)(batch)
        assert [ids[: len(their)].tolist() for ids, their in zip(teacher_batch.input_ids, theirs, strict=True)] == [
            their.ids for their in theirs
        ]
        learned = [labels[labels != IGNORE_INDEX].tolist() for labels in collate(theirs, 0).labels]
        assert [labels[labels != IGNORE_INDEX].tolist() for labels in teacher_batch.labels] == learned
        assert ((others.pairs >= 0) ^ (others.student_spans >= 0)).all(), "every label of the student is compared"


def test_a_cache_knows_examples_by_the_teachers_tokens():
    """So students with other tokenizers find the same examples in it."""
    found, own, teacher = [], [], TEACHERS["byte-level"]
    for student in (STUDENT, byte_level(350)):
        tokens = [[student(text, add_special_tokens=False)["input_ids"] for text in pair] for pair in PAIRS]
        items = [Encoded(prompt, [*answer, student.eos_token_id]) for prompt, answer in tokens]
        asked_for = zip(items, PAIRS, strict=True)
        prompts = {sample_id(item.prompt_ids): teacher(prompt)["input_ids"] for item, (prompt, _) in asked_for}
        batch = collate(items, student.pad_token_id).with_positions(shift=True)
        teacher_batch, _ = Translation(student, teacher, prompts=prompts, longest=100)(batch)
        found.append(teacher_batch.sample_ids)
        own.append(batch.sample_ids)
    assert found[0] == found[1]
    assert own[0] != own[1]
    assert len(set(found[0])) == len(PAIRS)


@pytest.mark.parametrize("starts", [True, False])
def test_plain_text_is_read_whole(starts):
    """The first token has no token before it that predicts it, unless a begin token of the teacher does."""
    teacher = byte_level(420, end="</end>", start="<begin>" if starts else None)
    text = "The cat sat on the mat, and the dog sat on the log."
    ids = torch.tensor([STUDENT(text)["input_ids"]])
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX
    batch = Batch(ids, torch.ones_like(ids), labels).with_positions(shift=True)
    teacher_batch, others = translation(teacher, prompts=False)(batch)
    theirs = TokenBytes(teacher).encode(text)
    assert teacher_batch.input_ids[0].tolist() == [*([teacher.bos_token_id] if starts else []), *theirs]
    found = texts_of_spans(batch, teacher_batch, others, teacher)
    assert all(one == other for one, other in found)
    first = TokenBytes(teacher).pieces[theirs[0]]
    compared = sum(len(one) for one, _ in found)
    missing = len(text) - compared
    assert 0 < missing <= max(len(first), len(TokenBytes(STUDENT).pieces[int(ids[0, 0])])) + 5


@pytest.mark.parametrize("name", TEACHERS)
def test_documents_of_a_text_are_compared_behind_each_end_token(name):
    """Packed text has end tokens in it, and what follows one is another piece of text to both tokenizers."""
    documents, teacher = ["The cat sat on the mat", "Name the month", "It is November."], TEACHERS[name]
    ids = [STUDENT.eos_token_id]
    for document in documents:
        ids += [*STUDENT(document, add_special_tokens=False)["input_ids"], STUDENT.eos_token_id]
    batch = collate_text([ids])
    teacher_batch, others = translation(teacher, prompts=False)(batch)
    found = texts_of_spans(batch, teacher_batch, others, teacher)
    assert all(one == other or one == other.removeprefix(b" ") for one, other in found)
    assert sum(one == b"END" for one, _ in found) == 3
    assert ((others.pairs >= 0) ^ (others.student_spans >= 0)).all(), "all labels"
    rows = [*others.pairs[others.pairs >= 0].tolist(), *(others.spans >= 0).nonzero()[:, 0].tolist()]
    assert sorted(rows) == list(range(len(others.labels))), "and each row of the teacher once"


def test_padding_on_the_left_changes_nothing():
    plain, translate = batch_of(PAIRS[:3]), translation(TEACHERS["byte-level"])
    free = [plain.input_ids.shape[1] - int(length) for length in plain.attention_mask.sum(1)]
    rolled = [
        torch.stack([row.roll(more) for row, more in zip(each, free, strict=True)])
        for each in (plain.input_ids, plain.attention_mask, plain.labels)
    ]
    (teacher_batch, expected), (again, found) = translate(plain), translate(Batch(*rolled))
    assert torch.equal(teacher_batch.input_ids, again.input_ids)
    for name in ("labels", "spans", "pairs", "student_spans", "starts"):
        assert torch.equal(getattr(expected, name), getattr(found, name)), name


def test_an_answer_that_ends_within_a_character_is_compared_up_to_it():
    item = encoded("The cat", "on 🙂")
    whole = len(item.response_ids)
    cut = Encoded(item.prompt_ids, item.response_ids[: whole - 3])
    batch = collate([cut], STUDENT.pad_token_id).with_positions(shift=True)
    teacher_batch, others = translation(TEACHERS["byte-level"], pairs=[("The cat", "")])(batch)
    found = texts_of_spans(batch, teacher_batch, others, TEACHERS["byte-level"])
    assert b"".join(one for one, _ in found).strip() == b"on"
    assert ((others.pairs < 0) & (others.student_spans < 0)).any()
    assert "not" in describe_shares(others)


def test_what_the_teacher_cannot_read_is_not_compared():
    batch, longest = batch_of(PAIRS[:1]), 8
    teacher_batch, others = translation(TEACHERS["byte-level"], longest=longest)(batch)
    assert teacher_batch.input_ids.shape[1] == longest
    found = texts_of_spans(batch, teacher_batch, others, TEACHERS["byte-level"])
    assert all(one == other for one, other in found)
    assert len(others.labels) < longest


def test_the_first_token_that_the_teacher_reads_is_predicted_by_none():
    item, teacher = encoded("The cat", "sat on the mat"), TEACHERS["byte-level"]
    translate = Translation(STUDENT, teacher, prompts={sample_id(item.prompt_ids): []}, longest=100)
    batch = collate([item], STUDENT.pad_token_id).with_positions(shift=True)
    teacher_batch, others = translate(batch)
    compared = b"".join(one for one, _ in texts_of_spans(batch, teacher_batch, others, teacher))
    first = TokenBytes(teacher).pieces[int(teacher_batch.input_ids[0, 0])]
    assert len(compared) <= len(b"sat on the matEND") - len(first)


@pytest.mark.parametrize("spans", ["alm", "uld"])
def test_the_gradient_is_that_of_the_batch_however_it_is_divided(spans):
    items = [encoded(*pair) for pair in PAIRS[:3]]
    teacher_tokens = TEACHERS["byte-level"]
    models = {
        role: tiny_model("llama", vocab_size=len(tokens), max_position_embeddings=64).double()
        for role, tokens in (("student", STUDENT), ("teacher", teacher_tokens))
    }
    method = build_kd(KdConfig(spans=spans, temperature=2.0), models["teacher"].config, models["student"].config)
    student = tap_student(method, models["student"])
    said: list[str] = []
    teacher = TranslatedTeacher(tap_teacher(method, models["teacher"]), translation(teacher_tokens), said.append)
    whole = collate(items, STUDENT.pad_token_id).with_positions(shift=True)
    divided = [
        collate_packed(items[:2], STUDENT.pad_token_id, max_length=200),
        collate(items[2:], STUDENT.pad_token_id),
    ]
    found = []
    for batches in ([whole], divided):
        models["student"].zero_grad()
        for batch in batches:
            with torch.no_grad():
                targets = teacher.compute_targets(batch.with_positions(shift=True), lm_head=("labels",))
            student.compute_losses(batch, method.bind_terms(targets, batch, whole.divisors())).total.backward()
        found.append([parameter.grad.clone() for parameter in models["student"].parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert max(float(each.abs().max()) for each in found[0]) > 1e-3
    (note,) = said  # at the first batch alone
    assert "of the first batch's labels" in note
    assert "% within spans" in note


def test_a_window_may_begin_within_a_character():
    """Its first tokens are the rest of a character, which no text has; what follows is compared."""
    teacher = TEACHERS["byte-level"]
    whole = STUDENT("\u6f22 the cat sat on the mat", add_special_tokens=False)["input_ids"]
    pieces = TokenBytes(STUDENT).pieces
    start = next(n for n, index in enumerate(whole) if 0x80 <= pieces[index][0] < 0xC0)
    batch = collate_text([whole[start:]])
    _, others = translation(teacher, prompts=False)(batch)
    rest = sum(0x80 <= pieces[index][0] < 0xC0 for index in whole[start:])
    compared = int(((others.pairs >= 0) | (others.student_spans >= 0)).sum())
    assert compared == len(whole) - start - max(rest, 1)
    teacher_batch, others = translation(sentencepiece_like(), prompts=False)(
        collate_text([whole[start : start + rest]])
    )
    assert teacher_batch.input_ids.numel() > 0  # the teacher reads a token in any case
    assert int((others.pairs >= 0).sum()) == 0


@pytest.mark.parametrize("text", ["élan of the cat", "Привет, the cat", "ηχώ the cat", "日本 the cat", "🙂 the cat"])
def test_a_window_may_begin_with_any_character(text):
    """Without a begin token of the student its first token is no label; the teacher reads it all the same."""
    ids = STUDENT(text, add_special_tokens=False)["input_ids"]
    assert len(TokenBytes(STUDENT).pieces[ids[0]]) == 1, "the first byte of a character"
    teacher = byte_level(420, end="</end>", start="<begin>")
    teacher_batch, others = translation(teacher, prompts=False)(collate_text([ids]))
    read = b"".join(TokenBytes(teacher).pieces[index] for index in teacher_batch.input_ids[0].tolist())
    assert read == text.encode()
    compared = (others.pairs >= 0) | (others.student_spans >= 0)
    assert int(compared.sum()) >= len(ids) - len(text[0].encode())


def collate_text(rows):
    ids = torch.tensor(rows)
    return Batch(ids, torch.ones_like(ids), ids.clone()).with_positions(shift=True)
