"""The attention mask of rows that hold several sequences: each token sees only its own sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from llmdistill.models.families import family_of


def packed_mask(segments_BT: Tensor, config: PreTrainedConfig) -> Tensor | dict[str, Tensor]:
    """The attention mask of a packed batch, in the ready form that decoders of transformers accept.

    Transformers can find the sequences from the position ids, but for this it reads the values of the position ids,
    and on a GPU the host would have to wait for them.

    Args:
        segments_BT: the number (from 1) of each token's sequence in its row; 0 at padding, which sees only padding.
        config: config of the model.

    Returns:
        (B, 1, T, T), True where a query (third axis) can see a key; a dict with one mask for each layer type if the
        config names layer types.
    """
    assert family_of(config).causal, "only decoders read packed rows"
    position_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    distance_TT = position_T[:, None] - position_T[None, :]
    full_B1TT = ((segments_BT[:, :, None] == segments_BT[:, None, :]) & (distance_TT >= 0))[:, None]
    window = getattr(config, "sliding_window", None)
    sliding_B1TT = full_B1TT if window is None else full_B1TT & (distance_TT < window)
    if (
        getattr(config, "layer_types", None) is None
    ):  # all layers are of one type; all of Mistral's slide if it has a window
        return sliding_B1TT
    return {"full_attention": full_B1TT, "sliding_attention": sliding_B1TT}
