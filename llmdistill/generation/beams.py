"""Beam search for encoders that learned to write (UniLM §2.3): a mask token is predicted, replaced, and appended anew.

The source and the tokens written so far do not see the mask, so their keys and values are computed once and cached. A
step computes two tokens of each beam: the newest one, whose keys and values are cached, and the mask. For a source of
464 tokens, 5 beams and a text of 48 tokens these are 464 + 48 * 5 * 2 = 944 tokens; without a cache they would be
117,000.

Letters in addition to the legend: S tokens of the source, K beams, N = B x K rows, Q tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from llmdistill.config import WritingConfig
from llmdistill.data.collate import pad_rows, padding_mask
from llmdistill.data.targets import Marks
from llmdistill.generation.decode import gather_answers, plan_batches, shared_jobs
from llmdistill.generation.refill import NoRepeatedNgram
from llmdistill.models.families import first_position
from llmdistill.models.general import cache_argument
from llmdistill.progress import progress
from llmdistill.runtime.distributed import largest_number


def penalty(length: int, alpha: float) -> float:
    """Return GNMT's divisor for a text of this length, end token included (Wu et al. 2016, eq. 14, no coverage)."""
    return float(((5 + length) / 6) ** alpha)


Step = Callable[[Tensor | None, Tensor | None], Tensor]
"""Predicts the next token of each beam, and keeps the state of the beams from step to step.

It takes the row of the last step that each row continues, (N,), and the token that was appended to each row, (N,), both
None in the first step; and returns the log-probabilities of the next tokens, (N, V), at least fp32.
"""


@torch.no_grad()
def search(
    step: Step,
    settings: WritingConfig,
    *,
    batch_size: int,
    end: int,
    forbidden: Tensor,
    all_done: Callable[[bool], bool] = bool,
) -> list[list[int]]:
    """Search the text with the largest penalized log-probability for each of `batch_size` sources.

    Args:
        step: predicts the next tokens.
        settings: how to search. A text that is cut at max_length competes with the finished ones.
        batch_size: B.
        end: the end token.
        forbidden: (V,), true at tokens that are never written; also determines the device.
        all_done: takes whether this search is done, and returns whether it stops. A search that goes on after it is
            done has the same result, because none of its beams can become better than the best text.

    Returns:
        The tokens of each text; the end token is the last one unless the text was cut.
    """
    beams, alpha, device = settings.beams, settings.length_penalty, forbidden.device
    # The row of the first beam of each source in (N, ...).
    first_B1 = torch.arange(batch_size, device=device)[:, None] * beams
    live_BK = torch.full((batch_size, beams), -torch.inf, device=device)
    live_BK[:, 0] = 0.0  # all beams are equal at first, so only one of them counts
    tokens_NT = torch.empty(batch_size * beams, 0, dtype=torch.long, device=device)
    best_B = torch.full((batch_size,), -torch.inf, device=device)
    texts: list[list[int]] = [[] for _ in range(batch_size)]
    parents_N: Tensor | None = None
    for length in range(1, settings.max_length + 1):
        log_probs_NV = step(parents_N, None if parents_N is None else tokens_NT[:, -1])
        if settings.no_repeat_ngram_size > 0:
            log_probs_NV = NoRepeatedNgram(settings.no_repeat_ngram_size)(tokens_NT, log_probs_NV)
        log_probs_NV = log_probs_NV.masked_fill(forbidden, -torch.inf)
        if length <= settings.min_length:
            log_probs_NV[:, end] = -torch.inf
        # 2 K continuations of each source's beams are enough: at most K of them are end tokens, one for each beam.
        words = log_probs_NV.shape[1]
        every_BC = (live_BK[:, :, None] + log_probs_NV.view(batch_size, beams, words)).flatten(1)
        scores_BC, flat_BC = every_BC.topk(2 * beams)
        parent_BC, token_BC = flat_BC // words, flat_BC % words
        is_end_BC = token_BC == end
        # A text ends only with one of the K best candidates, so that one beam is greedy decoding.
        ending_BC = scores_BC.masked_fill(~is_end_BC, -torch.inf)[:, :beams] / penalty(length, alpha)
        top_B, where_B = ending_BC.max(1)
        for b in (top_B > best_B).nonzero()[:, 0].tolist():
            texts[b] = [*tokens_NT[b * beams + parent_BC[b, where_B[b]]].tolist(), end]
        best_B = torch.maximum(best_B, top_B)
        # At most K of the 2 K candidates are ends, so K beams go on.
        live_BK, chosen_BK = scores_BC.masked_fill(is_end_BC, -torch.inf).topk(beams)
        parents_N = (first_B1 + parent_BC.gather(1, chosen_BK)).flatten()
        tokens_NT = torch.cat([tokens_NT[parents_N], token_BC.gather(1, chosen_BK).reshape(-1, 1)], dim=1)
        # The bound of what a beam can reach: log-probabilities only fall, and the largest divisor shrinks them most.
        reachable_B = live_BK[:, 0] / penalty(settings.max_length, alpha)
        if all_done(bool((best_B >= reachable_B).all())):
            break
    for b in (live_BK[:, 0] / penalty(settings.max_length, alpha) > best_B).nonzero()[:, 0].tolist():
        texts[b] = tokens_NT[b * beams].tolist()
    return texts


class MaskedSteps:
    """The steps of an encoder, which cache the keys and values of the source and of all tokens written so far."""

    def __init__(self, model: PreTrainedModel, sources: Sequence[Sequence[int]], marks: Marks, beams: int) -> None:
        """Compute the keys and values of the sources, each given with its special tokens."""
        argument = cache_argument(model)
        assert argument is not None, f"{model.config.model_type} models take no keys and values"
        self._model, self._marks = model, marks
        self._cache = DynamicCache()
        self._before = {argument: self._cache}
        self._first = first_position(model.config)
        real_BS = padding_mask(sources).bool().to(model.device)
        batch, width = real_BS.shape
        self._run_model(
            model.base_model,
            pad_rows(sources, marks.padding).to(model.device),
            real_BS[:, None, None, :].expand(batch, 1, width, width),
            torch.arange(width, device=model.device).expand(batch, -1),
            segment=0,
        )
        # The source is computed once, and its keys and values are copied for its beams.
        self._cache.batch_repeat_interleave(beams)
        self._real_NS = real_BS.repeat_interleave(beams, dim=0)
        self._lengths_N1 = self._real_NS.sum(1, keepdim=True)
        self._written = 0

    def __call__(self, parents_N: Tensor | None, newest_N: Tensor | None) -> Tensor:
        """Predict the next tokens; see Step."""
        rows = len(self._real_NS)
        mask_N = torch.full((rows,), self._marks.mask, device=self._real_NS.device)
        if parents_N is None or newest_N is None:
            tokens_NQ = mask_N[:, None]
        else:
            self._cache.crop(-1)  # the mask of the last step
            self._cache.reorder_cache(cast(torch.LongTensor, parents_N))
            tokens_NQ = torch.stack([newest_N, mask_N], dim=1)
        count = tokens_NQ.shape[1]
        # The mask stands at the place of the token that it predicts.
        place_Q = self._written + torch.arange(count, device=tokens_NQ.device)
        before_QT = torch.arange(self._written + count, device=tokens_NQ.device) <= place_Q[:, None]
        seen_NQT = torch.cat([self._real_NS[:, None].expand(-1, count, -1), before_QT.expand(rows, -1, -1)], dim=2)
        # Positions go on after the real tokens of the source, whatever padding its row has.
        result = self._run_model(self._model, tokens_NQ, seen_NQT[:, None], self._lengths_N1 + place_Q, segment=1)
        self._written += count - 1  # without the mask, which the next step crops
        logits_NV = result.logits[:, -1]
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)

    def _run_model(self, part: Any, tokens_NQ: Tensor, seen_N1QT: Tensor, place_NQ: Tensor, *, segment: int) -> Any:
        segments = {"token_type_ids": torch.full_like(tokens_NQ, segment)} if self._marks.has_segments else {}
        return part(
            input_ids=tokens_NQ,
            attention_mask=seen_N1QT,
            position_ids=self._first + place_NQ,
            **self._before,
            **segments,
        )


def write_targets(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    settings: WritingConfig,
    *,
    marks: Marks,
    batch_size: int,
    sharded: bool,
) -> list[list[int]]:
    """Write a text for each source, given with its special tokens: the tokens of each, in order and on every rank.

    Every rank must call this function; the model is in evaluation mode. The sources are divided into batches before the
    batches are distributed over the ranks.

    Args:
        model: an encoder with its LM head.
        sources, settings, marks: what is written, how it is searched, and the special tokens.
        batch_size: sources at once on each rank; each has as many rows as there are beams.
        sharded: whether the model's forward pass needs every rank (ZeRO-3).
    """
    # All sources, and not each rank's, so that a batch holds the same ones on any number of ranks.
    batches = plan_batches(sources, batch_size)
    is_forbidden = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=model.device)
    is_forbidden[list(marks.unwritten)] = True

    def all_ranks_done(done: bool) -> bool:
        # Sharded weights are gathered by all ranks, so that none may stop before the others.
        return largest_number(int(not done)) == 0

    answers: dict[int, list[int]] = {}
    for number, is_extra in progress([*shared_jobs(len(batches), synced=sharded)], "Answering", "batches"):
        batch = batches[number]
        with torch.no_grad():
            step = MaskedSteps(model, [sources[index] for index in batch], marks, settings.beams)
        texts = search(
            step,
            settings,
            batch_size=len(batch),
            end=marks.end,
            forbidden=is_forbidden,
            all_done=all_ranks_done if sharded else bool,
        )
        if not is_extra:
            answers.update(zip(batch, texts, strict=True))
    gathered, _ = gather_answers(answers, 0.0)
    return [gathered[index] for index in range(len(sources))]
