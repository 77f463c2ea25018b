"""Crops: in range, uniform, and independent of how the reading is divided."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import crop_start, read_batch
from data.errors import DataError

WORDS = st.integers(0, 2**64 - 1)
TEXT = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)


@given(seed=WORDS, stage=WORDS, sample=WORDS, positions=st.integers(1, 2**64 - 1))
def test_a_crop_is_in_range_and_repeatable(seed, stage, sample, positions):
    start = crop_start(seed, stage, sample, positions)
    assert 0 <= start < positions
    assert start == crop_start(seed, stage, sample, positions)


def test_known_crops_never_change():
    """These stand in every resumed run: a change breaks all of them."""
    found = [crop_start(1, 5, sample, 90_000_000 - 23_040) for sample in range(4)]
    assert found == KNOWN
    assert crop_start(0, 1, 0, 1) == 0


KNOWN = [66_862_144, 5_388_374, 86_984_253, 22_855_141]


@given(cuts=st.lists(st.integers(1, 7), max_size=3), length=st.integers(1, 300))
@settings(max_examples=50)
def test_the_division_into_batches_does_not_matter(cuts, length):
    whole = read_batch(TEXT, 3, 2, 10, 8, length)
    edges = sorted({0, 8, *cuts})
    parts = [
        read_batch(TEXT, 3, 2, 10 + start, stop - start, length) for start, stop in pairwise(edges)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(seed=st.integers(0, 2**62), sample=st.integers(0, 2**40), length=st.integers(1, 4999))
@settings(max_examples=50)
def test_rows_are_the_crops(seed, sample, length):
    batch = read_batch(TEXT, seed, 1, sample, 2, length)
    assert batch.shape == (2, length + 1)
    assert batch.dtype == np.uint8
    for row, number in zip(batch, (sample, sample + 1), strict=True):
        start = crop_start(seed, 1, number, len(TEXT) - length)
        np.testing.assert_array_equal(row, TEXT[start : start + length + 1])


def test_seed_stage_and_sample_all_matter():
    many = [
        crop_start(seed, stage, sample, 2**62)
        for seed in range(6)
        for stage in range(6)
        for sample in range(6)
    ]
    assert len(set(many)) == len(many)


def test_all_positions_are_reached_and_the_last_byte_is_read():
    assert {crop_start(7, 1, sample, 11) for sample in range(300)} == set(range(11))
    text = np.arange(20, dtype=np.uint8)
    batch = read_batch(text, 7, 1, 0, 200, 9)
    assert batch.min() == 0
    assert batch.max() == 19


def test_starts_are_uniform():
    """Chi-square over 64 bins: mean 63, standard deviation 11.2; fixed seed, so no luck."""
    draws, bins = 6400, 64
    starts = [crop_start(11, 3, sample, 90_000_000) for sample in range(draws)]
    counts = np.bincount(np.array(starts) * bins // 90_000_000, minlength=bins)
    assert ((counts - draws / bins) ** 2 / (draws / bins)).sum() < 63 + 4 * 11.2


def test_no_start_is_favoured_when_positions_do_not_divide_the_words():
    """Without rejection the lowest third would be drawn half of the time."""
    starts = [crop_start(2, 1, sample, 3 * 2**62) for sample in range(2000)]
    assert abs(sum(start < 2**62 for start in starts) / 2000 - 1 / 3) < 4 * 0.0105


def test_successive_samples_are_not_correlated():
    starts = np.array([crop_start(5, 1, sample, 10**6) for sample in range(4000)]) / 10**6
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 4 / np.sqrt(4000)


def test_a_batch_is_a_copy():
    text = TEXT.copy()
    read_batch(text, 0, 1, 0, 4, 100)[:] = 0
    np.testing.assert_array_equal(text, TEXT)


def test_a_text_of_just_one_sample_is_enough():
    text = TEXT[:2049]
    np.testing.assert_array_equal(read_batch(text, 0, 1, 5, 3, 2048), np.stack([text] * 3))


@pytest.mark.parametrize("size", [0, 1, 2047, 2048])
def test_a_text_that_is_too_short_is_refused(size):
    with pytest.raises(DataError, match=f"{size} bytes, a sample of length 2048 needs 2049"):
        read_batch(TEXT[:size], 0, 1, 0, 1, 2048)


@pytest.mark.parametrize("change", [{"count": 0}, {"length": 0}, {"seed": -1}, {"stage": 2**64}])
def test_arguments_out_of_range_are_refused(change):
    arguments = {"seed": 0, "stage": 1, "first_sample": 0, "count": 1, "length": 4} | change
    with pytest.raises(ValueError, match=next(iter(change))):
        read_batch(TEXT, **arguments)


def test_no_positions_are_refused():
    with pytest.raises(ValueError, match="positions=0"):
        crop_start(0, 1, 0, 0)
