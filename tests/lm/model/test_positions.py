"""The position table against arbitrary-precision arithmetic."""

import mpmath
import pytest
import torch

from lm.model.positions import sinusoidal_table


@pytest.mark.parametrize("distance", [0, 1, 2_047, 32_768])
def test_rows_are_exact_to_float32_rounding(distance):
    width = 16
    row = sinusoidal_table(distance + 1, width)[distance]
    mpmath.mp.dps = 30
    for t in range(width // 2):
        angle = distance * mpmath.power(10_000, mpmath.mpf(-2 * t) / width)
        assert float(row[t]) == pytest.approx(float(mpmath.sin(angle)), abs=6e-8)
        assert float(row[width // 2 + t]) == pytest.approx(float(mpmath.cos(angle)), abs=6e-8)


def test_all_sines_come_before_all_cosines():
    table = sinusoidal_table(1, 6)
    assert table.tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]
    assert table.dtype == torch.float32
