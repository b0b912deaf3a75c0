"""Losses: pure functions of tensors and masks that return a sum and a count. They do not depend on a model.

    from llmdistill.losses import forward_kl, hidden_mse, output_divergence

    output = output_divergence(student_logits, teacher_logits, labels, divergence=forward_kl, temperature=2.0)
    hidden = hidden_mse(student_hidden, teacher_hidden, attention_mask)
    (output.sum / output.count + hidden.sum / hidden.count).backward()

Logits are (B, T, V). Labels are (B, T), not shifted, with -100 where nothing is learned. Hidden states are (B, T, W).
Masks are (B, T) with 1 at real tokens. Divide by the count over the global batch: then the split of the batch over
ranks and accumulation steps does not change the result.

The names below are imported on first use, so that methods can be listed and their settings parsed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# ruff: noqa: F401  (these imports are for type checkers; __getattr__ loads the same names)

if TYPE_CHECKING:
    from llmdistill.losses.attention import (
        AttentionInputs,
        AttentionMask,
        RelationInputs,
        attention_kl,
        attention_score_mse,
        relation_kl,
        repeat_heads,
        side_by_side,
    )
    from llmdistill.losses.divergence import (
        DIVERGENCES,
        FORWARD_KL,
        LOG_RATIO,
        REVERSE_KL,
        SOFT_CROSS_ENTROPY,
        TOTAL_VARIATION,
        Divergence,
        DivergenceEntry,
        divergence_by_autograd,
        forward_kl,
        jsd,
        jsd_with_derivative,
        log_ratio,
        output_divergence,
        reverse_kl,
        skew_forward_kl,
        skew_forward_kl_with_derivative,
        skew_reverse_kl,
        skew_reverse_kl_with_derivative,
        total_variation,
    )
    from llmdistill.losses.features import hidden_cosine, hidden_mse, matrix_mse
    from llmdistill.losses.head import HeadInputs, TokenLosses, token_losses
    from llmdistill.losses.sequence import (
        sequence_cross_entropy,
        sequence_divergence,
        sequence_embedding_cosine,
        sequence_embedding_mse,
        sequence_margin_mse,
        sequence_mse,
        sequence_score_mse,
        sequence_soft_cross_entropy,
    )
    from llmdistill.losses.terms import BoundTerms, LayerTerm, Losses, SequenceTerm, TokenTerm, add_losses

_NAMES = {
    "attention": (
        *("AttentionInputs", "AttentionMask", "RelationInputs", "attention_kl", "attention_score_mse", "relation_kl"),
        *("repeat_heads", "side_by_side"),
    ),
    "divergence": (
        *("DIVERGENCES", "FORWARD_KL", "LOG_RATIO", "REVERSE_KL", "SOFT_CROSS_ENTROPY", "TOTAL_VARIATION"),
        *(
            "Divergence",
            "DivergenceEntry",
            "divergence_by_autograd",
            "forward_kl",
            "jsd",
            "jsd_with_derivative",
            "log_ratio",
            "output_divergence",
        ),
        *("reverse_kl", "skew_forward_kl", "skew_forward_kl_with_derivative", "skew_reverse_kl"),
        *("skew_reverse_kl_with_derivative", "total_variation"),
    ),
    "features": ("hidden_cosine", "hidden_mse", "matrix_mse"),
    "head": ("HeadInputs", "TokenLosses", "token_losses"),
    "sequence": (
        *("sequence_cross_entropy", "sequence_divergence", "sequence_embedding_cosine", "sequence_embedding_mse"),
        *("sequence_margin_mse", "sequence_mse", "sequence_score_mse", "sequence_soft_cross_entropy"),
    ),
    "terms": ("LayerTerm", "Losses", "BoundTerms", "SequenceTerm", "TokenTerm", "add_losses"),
}
"""Module -> the names that are imported from it."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept, as a method asks for its loss in each layer.
    globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return globals()[name]
