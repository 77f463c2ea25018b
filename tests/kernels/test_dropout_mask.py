"""The dropout mask: its rate, its independence, and what it does to the output.

Seeds are fixed, so a test passes always or never. Each figure is held to 4.5 of its standard
deviations, which one figure in 150,000 of true randomness passes.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels import Band, banded_attention
from kernels.dropout import keep_mask, keep_words, row_keys

LIMIT = 4.5
RATE = 0.3
SEED = 2**45 + 6789


def mask(
    seed: int = SEED, streams: int = 1, rows: int = 256, deltas: int = 512, rate: float = RATE
) -> Tensor:
    """[streams, rows, deltas], as 0 and 1"""
    keys = row_keys(seed, torch.arange(streams)[:, None], torch.arange(rows))
    return keep_mask(rate, keys[..., None], torch.arange(deltas)).double()


def deviation(x: Tensor, rate: float = RATE) -> float:
    """Of the mean, in standard deviations."""
    return (x.mean().item() - (1 - rate)) / math.sqrt(rate * (1 - rate) / x.numel())


def correlation(x: Tensor, y: Tensor) -> float:
    """In standard deviations."""
    centred = (x - (1 - RATE)) * (y - (1 - RATE))
    return centred.mean().item() / (RATE * (1 - RATE)) * math.sqrt(x.numel())


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.5, 0.9])
def test_rate(rate: float) -> None:
    assert abs(deviation(mask(rate=rate), rate)) < LIMIT


def test_rows_and_deltas_are_alike_and_independent() -> None:
    kept = mask()[0]
    for name, one, other in [
        ("next delta", kept[:, 1:], kept[:, :-1]),
        ("next row", kept[1:], kept[:-1]),
        ("same key", kept[1:, 1:], kept[:-1, :-1]),
        ("far delta", kept[:, 256:], kept[:, :-256]),
        ("far row", kept[128:], kept[:-128]),
    ]:
        assert abs(correlation(one, other)) < LIMIT, name
    for along in (0, 1):
        # the means of rows, or of columns, spread as much as chance makes them
        means = kept.mean(along)
        spread = means.var().item() / (RATE * (1 - RATE) / kept.shape[along])
        assert abs(spread - 1) < LIMIT * math.sqrt(2 / means.numel()), along


def test_heads_batches_and_seeds_are_independent() -> None:
    kept = mask(streams=4)
    for one, other in pairwise(kept):
        assert abs(correlation(one, other)) < LIMIT
        # nor is one stream another one, moved by a row or a delta
        assert abs(correlation(one[1:], other[:-1])) < LIMIT
        assert abs(correlation(one[:, 1:], other[:, :-1])) < LIMIT
    for seed in (SEED + 1, SEED + 2**32, SEED ^ 2**61, 0):
        assert abs(correlation(kept, mask(seed, streams=4))) < LIMIT, seed


def test_the_fast_form_is_the_same() -> None:
    keys = row_keys(SEED, torch.tensor(3), torch.arange(100))[:, None]
    deltas = torch.arange(77)
    words, work = (torch.zeros(100, 77, dtype=torch.int32) for _ in range(2))
    fast = keep_words(RATE, keys, deltas, words, work)
    assert torch.equal(fast.bool(), keep_mask(RATE, keys, deltas))


def test_the_output_is_right_in_the_mean(backend: str) -> None:
    """Every sequence of a batch has its own mask: 2,000 draws of the same attention."""
    draws = 2000
    q, k, v = (torch.randn(1, 12, 1, 16).expand(draws, -1, -1, -1) for _ in range(3))
    band = Band(5, (1,))
    expected = banded_attention(q[:1], k[:1], v[:1], band, backend="dense")
    out = banded_attention(q, k, v, band, dropout=RATE, backend=backend)
    of_the_mean = out.std(0) / math.sqrt(draws)
    assert ((out.mean(0) - expected[0]).abs() < LIMIT * of_the_mean).all()
    assert out[:, 0].eq(0).all(-1).double().mean().item() == pytest.approx(RATE, abs=0.04)


def test_the_seed_is_drawn_from_torchs_generator(backend: str) -> None:
    x = torch.randn(1, 20, 2, 16)
    band = Band(6, (1, 2))
    torch.manual_seed(5)
    first, second = (banded_attention(x, x, x, band, dropout=RATE, backend=backend) for _ in "ab")
    torch.manual_seed(5)
    assert torch.equal(first, banded_attention(x, x, x, band, dropout=RATE, backend=backend))
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    banded_attention(x, x, x, band, backend=backend)
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn without dropout
