from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lm.measuring.bpc import Score, Tally, character_nats, summed


def test_bits_per_character_is_the_sum_over_the_count() -> None:
    parts = [Score(math.log(2) * count, count) for count in (4, 4, 1)]
    parts[-1] = Score(10 * math.log(2), 1)
    assert sum(parts, Score()).bpc == pytest.approx(18 / 9)  # a mean of means gives 4


def test_an_empty_score_has_no_number() -> None:
    with pytest.raises(ValueError, match="no character was scored"):
        _ = Score().bpc
    with pytest.raises(ValueError, match="count is -1"):
        Score(0.0, -1)


def test_small_losses_are_not_lost_in_a_large_sum() -> None:
    score = Score(2.0**24, 1)  # in float32 its neighbours are 2 apart
    for _ in range(1000):
        score += Score(1e-3, 1)
    assert score.nats - 2.0**24 == pytest.approx(1.0, rel=1e-5)


def test_losses_of_uniform_logits_are_eight_bits() -> None:
    nats = character_nats(torch.zeros(2, 3, 256), torch.tensor([[0, 1, 255], [7, 8, 9]]))
    assert nats.dtype == torch.float64
    assert nats.shape == (2, 3)
    assert (nats / math.log(2)).numpy() == pytest.approx(np.full((2, 3), 8.0), abs=1e-6)


def test_losses_are_float32_also_for_half_precision_logits() -> None:
    logits = torch.randn(5, 256).bfloat16()
    targets = torch.arange(5)
    expected = -logits.double().log_softmax(-1)[range(5), targets]
    torch.testing.assert_close(character_nats(logits, targets), expected, rtol=1e-6, atol=1e-6)


def test_alone_the_sum_over_processes_is_the_score_itself() -> None:
    assert summed(Score(1.5, 2)) == Score(1.5, 2)


def test_tally_leaves_a_byte_out_and_names_how_often() -> None:
    tally = Tally(left_out=10)
    nats = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], dtype=torch.float64)
    tally.add(nats, torch.tensor([[10, 1, 2], [3, 10, 10]]), range(5, 8))
    assert tally.score == Score(1.0 * (2 + 4 + 8), 3)
    assert tally.ignored == 3


def test_tally_sorts_losses_by_context() -> None:
    tally = Tally(left_out=10, edges=[2, 4])
    nats = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.float64)
    tally.add(nats, torch.tensor([[0, 0, 10, 0]]), range(1, 5))
    tally.add(nats, torch.tensor([[0, 0, 0, 0]]), range(3, 7))
    assert tally.curve_nats.tolist() == [2.0 + 1.0, 8.0 + 2.0 + 4.0 + 8.0]
    assert tally.curve_counts.tolist() == [2, 4]
    tally.sum_over_processes()
    assert tally.score == Score(26.0, 7)  # the character with a context of 1 counts here only
