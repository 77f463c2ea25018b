from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.config.checks import schedule_of
from lm.costs.flops import flops_per_character, visible_pairs


def test_flops_of_the_small_model(compose):
    config = compose("experiment=enwik8_small")
    schedule = schedule_of(config)
    dense = 2 * (12 * (4 * 512**2 + 2 * 512 * 2048) + 256 * 512)
    assert dense == pytest.approx(75.8e6, rel=0.001)
    for number, attention in ((1, 8.5e6), (5, 135e6)):
        flops = flops_per_character(config.model, schedule[number])
        assert dense < flops < dense + attention * 1.12


@given(n=st.integers(1, 60), window=st.integers(0, 70), stride=st.integers(1, 9))
def test_visible_pairs_counts_what_a_head_sees(n, window, stride):
    seen = sum(1 for i in range(n) for d in range(window + 1) if i - d * stride >= 0)
    assert visible_pairs(n, window, stride) == seen
