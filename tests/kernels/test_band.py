"""What a band lets each position see, by the definition itself."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Band
from kernels.call import make_call
from kernels.reference import band_pattern


@given(
    window=st.integers(0, 12),
    strides=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    queries=st.integers(1, 9),
    before=st.integers(0, 9),
)
@settings(max_examples=40)
def test_a_position_sees_itself_and_window_positions_before_it(window, strides, queries, before):
    band = Band(window, strides)
    q = torch.zeros(1, queries, len(strides), 1)
    k = torch.zeros(1, before + queries, len(strides), 1)
    delta, visible = band_pattern(make_call(q, k, k, band))
    for head, stride in enumerate(strides):
        for row in range(queries):
            i = before + row
            seen = {i - d * stride: d for d in range(window + 1) if i - d * stride >= 0}
            found = visible[head, row].nonzero()[:, 0].tolist()
            assert found == sorted(seen)
            assert [int(delta[head, row, j]) for j in found] == [seen[j] for j in found]
            assert i - min(seen) <= band.reach
