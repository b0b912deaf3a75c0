"""How far a student is from its teacher on some text: nats per token, perplexity, and what that means in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch, HeadInputs
from llmdistill.losses.divergence import FORWARD_KL
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import TokenTerm
from llmdistill.progress import progress
from llmdistill.runtime.devices import to_device_later
from llmdistill.runtime.distributed import World
from llmdistill.students.start.sampled import judged_rows, tapped_output
from llmdistill.tasks.perplexity import perplexity_of, show_perplexity

MOST_TOKENS = 8_192
"""Tokens that are compared at most: with more the divergence hardly changes, and a CPU takes minutes."""
HOPELESS = 3.0
"""Nats per token from which no sensible word is left: a perplexity of 24 becomes one of about 480."""
_VERDICTS = {
    0.05: "hardly differs from its teacher",
    0.15: "is close to its teacher",
    0.5: "keeps most of what its teacher knows",
    1.0: "has lost much of what its teacher knows, which training can bring back",
    HOPELESS: "has lost most of what its teacher knows, and needs a long training",
}
"""Up to this divergence -> what is said of a student. Of SmolLM2-135M: its int8 weights are at 0.005; students of 80 %
at 0.37 untrained and 0.27 trained, with 0.8 and 0.9 of the teacher's ROUGE-L; one of 60 % at 1.6."""


@dataclass(frozen=True)
class Distance:
    """How a student predicts the next tokens of a text, beside its teacher."""

    divergence: float
    """KL(teacher‖student), the mean over the learned tokens in nats."""
    perplexity: float
    """The student's."""
    teacher_perplexity: float
    tokens: int

    @property
    def verdict(self) -> str:
        """What the divergence means, as the end of a sentence that begins with the student."""
        if self.is_hopeless:
            return "keeps nothing sensible of its teacher"
        return next(words for limit, words in _VERDICTS.items() if self.divergence <= limit)

    @property
    def is_hopeless(self) -> bool:
        """Whether nothing sensible of the teacher is left, of which users are warned; NaN is nothing sensible."""
        return not self.divergence <= HOPELESS

    def sentence(self, of: str) -> str:
        """Say what the divergence means, and on which text it was measured."""
        return (
            f"{self.verdict}: {self.divergence:.3g} nats per token, perplexity {show_perplexity(self.perplexity)} "
            f"(teacher {show_perplexity(self.teacher_perplexity)}), on {self.tokens:,} tokens of {of}"
        )


@dataclass(frozen=True)
class ModelRows:
    """What a model gives for a batch, on the CPU."""

    rows: HeadInputs
    """The inputs of its LM head (N, K) at all tokens that predict a label, or its logits."""
    labels_N: Tensor
    """The next tokens."""


def cut_to_tokens(batches: Iterable[Batch], most: int = MOST_TOKENS) -> list[Batch]:
    """Return the first batches, cut after the row with which they have so many real tokens."""
    taken, left = list[Batch](), most
    for batch in batches:
        lengths = (batch.attention_mask != 0).sum(1).cumsum(0)
        rows = int((lengths < left).sum()) + 1
        taken.append(batch if rows >= len(lengths) else batch.select(slice(0, rows)))
        left -= int(lengths[min(rows, len(lengths)) - 1])
        if left <= 0:
            break
    return taken


@torch.no_grad()
def sample_texts(model: PreTrainedModel, count: int = 8, length: int = 64, seed: int = 0) -> list[Batch]:
    """Return texts that a decoder samples from its first token, for a comparison where no others are given."""
    config = model.config
    first = next((token for token in (config.bos_token_id, config.eos_token_id) if isinstance(token, int)), 0)
    ids = torch.full((count, 1), first, device=model.device)
    training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for _ in progress(range(length), "Sampling texts of the teacher", "tokens"):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    model.train(training)
    return [Batch(ids.cpu(), torch.ones_like(ids).cpu(), ids.cpu())]


@torch.no_grad()
def read_rows(model: PreTrainedModel, batches: Sequence[Batch], name: str) -> list[ModelRows]:
    """Return what a decoder gives for batches of unpacked rows; a sharded model needs every rank."""
    seen, left = list[ModelRows](), 2**28  # numbers of logits: 1 GiB, for models whose logits are more than a product
    with tapped_output(model) as tapped:
        for batch in progress(batches, f"Reading held-out rows with the {name}", "batches"):
            head, _, _ = judged_rows(tapped, batch.with_positions(shift=tapped.shift).to(model.device))
            # The label that each real token predicts; IGNORE_INDEX where none is learned, as in prompts.
            next_BT = torch.full_like(batch.labels, IGNORE_INDEX)
            next_BT[:, :-1] = batch.labels[:, 1:]
            labels_N = next_BT[batch.attention_mask != 0].cpu()
            known_N = labels_N != IGNORE_INDEX
            places_N = known_N.nonzero()[:, 0]  # of a mask on a GPU the host would wait for their number
            rows_NK = head.rows.index_select(0, places_N.to(head.rows.device, non_blocking=True))
            if head.weight is None:
                rows_NK = rows_NK[: left // rows_NK.shape[1]]
                left -= rows_NK.numel()
            seen.append(ModelRows(HeadInputs(rows_NK.cpu(), head.weight, head.bias), labels_N[known_N][: len(rows_NK)]))
    return seen


@torch.no_grad()
def compare_rows(teacher: Sequence[ModelRows], student: Sequence[ModelRows]) -> Distance:
    """Compare what two models give for the same batches; the logits are computed chunk by chunk where the heads lie."""
    labels = TokenTerm("label", None)
    terms = [TokenTerm("divergence", FORWARD_KL), labels]
    sums, count = list[Tensor](), 0
    for theirs, ours in progress(list(zip(teacher, student, strict=True)), "Comparing probabilities", "batches"):
        shared = min(len(theirs.labels_N), len(ours.labels_N))
        if not shared:
            continue
        dense, changed = _on(theirs.rows, shared), _on(ours.rows, shared)
        labels_N = to_device_later(ours.labels_N[:shared], dense.rows.device)
        vocabulary = min(_width(dense), _width(changed))
        both = token_losses(changed, dense, labels_N, terms, torch.ones(2), vocabulary=vocabulary).sums
        alone = token_losses(dense, None, labels_N, [labels], torch.ones(1), vocabulary=vocabulary).sums
        sums.append(torch.cat([both, alone]).double())
        count += len(labels_N)
    # The device is asked once.
    total = torch.stack(sums).sum(0).tolist() if sums else [0.0, 0.0, 0.0]
    divergence, loss, teacher_loss = (value / max(count, 1) for value in total)
    return Distance(max(divergence, 0.0), perplexity_of(loss), perplexity_of(teacher_loss), count)


def _on(seen: HeadInputs, count: int) -> HeadInputs:
    """Return the first rows, with the head, on the device of this rank."""
    device = World.current().device
    weight, bias = (None if tensor is None else tensor.to(device) for tensor in (seen.weight, seen.bias))
    return HeadInputs(to_device_later(seen.rows[:count], device), weight, bias)


def _width(seen: HeadInputs) -> int:
    return seen.rows.shape[1] if seen.weight is None else len(seen.weight)
