import numpy as np
import torch

from llmdistill.generation.row_draws import RowDraws, RowSamples, split_mix_64, tokens_at

LOGITS = torch.tensor([-torch.inf, 2.0, -torch.inf, 1.0, 0.0, -1.0, -torch.inf])


def shares_of(draws, logits):
    """The share of each token in 20,000 draws of two rows."""
    scores = logits.expand(2, len(logits))
    drawn = torch.cat([draws(torch.empty(2, 0), scores).argmax(-1) for _ in range(10_000)])
    return torch.bincount(drawn, minlength=len(logits)) / len(drawn)


def test_split_mix_gives_the_published_numbers():
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    seeds = np.full(5, 1234567, dtype=np.uint64)
    assert split_mix_64(seeds, np.arange(5, dtype=np.uint64)).tolist() == expected


def test_tokens_have_the_frequencies_of_the_softmax():
    shares = shares_of(RowDraws([7, 2**64 - 1]), LOGITS)
    # Three standard deviations of a share of a half.
    torch.testing.assert_close(shares, LOGITS.softmax(-1), atol=0.011, rtol=0)
    assert not shares[LOGITS.isinf()].any()


def test_frequencies_after_a_temperature_and_cuts():
    probs = torch.tensor([0.05, 0.4, 0.3, 0.25])
    shares = shares_of(RowSamples([7, 8], temperature=2.0, top_p=0.75, top_k=3), 2 * probs.log())
    torch.testing.assert_close(shares, torch.tensor([0, 0.4, 0.3, 0.25]) / 0.95, atol=0.011, rtol=0)
    shares = shares_of(RowSamples([7, 8], temperature=2.0, top_p=0.7, top_k=3), 2 * probs.log())
    torch.testing.assert_close(shares, torch.tensor([0, 0.4, 0.3, 0]) / 0.7, atol=0.011, rtol=0)


def test_no_number_draws_a_token_of_probability_0():
    ends = torch.tensor([0, 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert tokens_at(LOGITS.expand(3, -1), ends).tolist() == [1, 1, 5]
    # Between the tokens as well: the number at which one begins is not below its end.
    even = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf, -torch.inf, 0.0, 0.0])
    quarters = torch.tensor([0.25, 0.25 - 2.0**-54, 0.5, 0.75], dtype=torch.float64)
    assert tokens_at(even.expand(4, -1), quarters).tolist() == [2, 0, 5, 6]


def test_a_row_is_drawn_even_from_logits_that_are_nan():
    assert 0 <= tokens_at(torch.full((1, 4), torch.nan), torch.zeros(1, dtype=torch.float64)).item() < 4
