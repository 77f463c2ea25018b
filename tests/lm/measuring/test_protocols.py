"""Which characters the protocols score, with which context, and how the losses add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lm.measuring.bpc import Score, Tally
from lm.measuring.protocols import Grid, Window, score_windows, share, stream
from lm.model.language_model import LanguageModel
from tests.lm.evaluation_cases import (
    FIELD,
    losses_of,
    random_text,
    tiny_model,
    uniform_model,
    unigram_model,
)

BIT = math.log(2)


def score_grid(
    model: LanguageModel, text: np.ndarray, grid: Grid, world: int = 1, **options: int
) -> Score:
    tally = Tally()
    for rank in range(world):
        windows = grid.windows(share(len(grid), rank, world))
        score_windows(model, text, windows, tally, **options)
    return tally.score


def brute_force(model: LanguageModel, text: np.ndarray, window: int, step: int, context: int):
    """The losses of `overlap`, each target by itself: one forward pass over what it may see."""
    losses = []
    for target in range(max(context, 1), len(text)):
        if context:
            ahead = min(step - 1 - (target - context) % step, len(text) - 1 - target)
            start = max(0, target + ahead - window)
        else:
            start = max(0, -(-(target - window) // step) * step)
        losses.append(losses_of(model, text[start : target + 1])[-1])
    return np.array(losses)


def test_uniform_model_scores_eight_bits() -> None:
    text = np.arange(256).astype(np.uint8).repeat(3)
    for score in (
        stream(uniform_model(), text, chunk=100),
        score_grid(uniform_model(), text, Grid(len(text), 0, 100, 30)),
    ):
        assert score.count == 767
        assert f"{score.bpc:.6f}" == "8.000000"


@pytest.mark.parametrize("batch", [1, 3])
def test_known_losses_give_their_exact_mean(batch: int) -> None:
    model = unigram_model({ord("a"): 1, ord("z"): 20})
    text = np.frombuffer(b"a" * 993 + b"z" * 7, np.uint8)
    expected = (992 * 1 + 7 * 20) / 999
    assert stream(model, text, chunk=64).bpc == pytest.approx(expected, abs=1e-5)
    overlap = score_grid(model, text, Grid(1000, 0, 64, 16), batch=batch)
    assert overlap.bpc == pytest.approx(expected, abs=1e-5)
    assert overlap.count == 999


@pytest.mark.parametrize("context", [0, 1, 13])
def test_each_target_counts_exactly_once_by_index(context: int) -> None:
    model = unigram_model({ord("a"): 1, ord("z"): 20})
    size = 31
    for index in range(size):
        text = np.full(size, ord("a"), np.uint8)
        text[index] = ord("z")
        scored = index >= max(context, 1)
        count = size - max(context, 1)
        expected = count + 19 * scored
        for score in (
            stream(model, text, context=context, chunk=8),
            score_grid(model, text, Grid(size, context, 10, 4), batch=3),
        ):
            assert score.count == count
            assert score.nats / BIT == pytest.approx(expected, abs=1e-3), index


@pytest.mark.parametrize("context", [0, 1, 25])
@pytest.mark.parametrize(("window", "step"), [(20, 6), (12, 12), (7, 1), (64, 9), (200, 50)])
def test_overlap_is_brute_force_where_context_is_cut(window: int, step: int, context: int) -> None:
    model, text = tiny_model(), random_text(83)
    expected = brute_force(model, text, window, step, context)
    score = score_grid(model, text, Grid(len(text), context, window, step))
    assert score.count == len(expected)
    assert score.bpc == pytest.approx(expected.mean() / BIT, abs=1e-6)
    if window - step < FIELD / 2:  # else the test could not see a mistake
        whole = stream(model, text, context=context)
        assert abs(whole.bpc - score.bpc) > 1e-3


def test_window_of_length_and_shorter_texts() -> None:
    model = tiny_model()
    for size in (2, 3, 19, 20, 21, 22, 26, 27):
        text = random_text(size)
        score = score_grid(model, text, Grid(size, 0, 20, 6))
        assert score.count == size - 1
        assert score.nats == pytest.approx(brute_force(model, text, 20, 6, 0).sum(), abs=1e-5)
    for size in (0, 1):
        assert score_grid(model, random_text(size), Grid(size, 0, 20, 6)).count == 0
        assert stream(model, random_text(size)).count == 0


def test_overlap_equals_stream_where_the_field_fits() -> None:
    model, text = tiny_model(), random_text(150)
    overlap = score_grid(model, text, Grid(150, 0, FIELD + 10, 10))
    assert overlap.bpc == pytest.approx(stream(model, text).bpc, abs=1e-6)


def test_the_papers_numbers() -> None:
    grid = Grid(5_000_000, 0, 32_256, 512)
    assert len(grid) == 9704
    assert next(grid.windows(range(1))) == Window(0, 32_256, 0)
    assert list(grid.windows(range(9703, 9704))) == [Window(4_967_936, 4_999_999, 4_999_680)]
    paper = list(Grid(5_000_000, 0, 32_256, 512, full_only=True).windows(range(9704)))
    assert len(paper) == 9703
    assert sum(w.stop - w.first for w in paper) == 4_967_936
    # Targets, one behind the position that predicts them.
    assert paper[0].first + 1 - 1 == 31_744
    assert 4_999_999 - paper[-1].stop == 319
    behind = Grid(5_040_000, 40_000, 32_256, 512)
    windows = list(behind.windows(range(len(behind))))
    assert len(windows) == -(-5_000_000 // 512)
    assert all(w.stop - w.start == 32_256 for w in windows)
    assert sum(w.stop - w.first for w in windows) == 5_000_000


def test_paper_scores_the_last_step_of_full_windows() -> None:
    model, text = tiny_model(), random_text(97)
    expected = brute_force(model, text, 20, 6, 0)
    score = score_grid(model, text, Grid(97, 0, 20, 6, full_only=True))
    full = (96 - 20) // 6 + 1
    assert score.count == full * 6
    assert score.nats == pytest.approx(expected[14 : 14 + full * 6].sum(), abs=1e-5)


def test_later_windows_give_at_least_window_minus_step_plus_1() -> None:
    for context in (0, 100):
        for window in list(Grid(5000, context, 256, 32).windows(range(1000)))[1:]:
            if window.start:
                assert window.first + 1 - window.start >= 225


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16])
def test_batch_and_chunk_do_not_change_the_number(batch: int) -> None:
    model, size = tiny_model(), 257
    text = random_text(size)
    text[-50:] = 255  # an improbable end shows whether the tail counts
    expected = score_grid(model, text, Grid(size, 0, 40, 16))
    assert expected.count == size - 1
    for chunk in (37, 4096):
        score = score_grid(model, text, Grid(size, 0, 40, 16), batch=batch, chunk=chunk)
        assert score.count == expected.count
        assert score.bpc == pytest.approx(expected.bpc, abs=1e-6)
    whole = losses_of(model, text).sum()
    for start, chunk in ((180, batch), (0, 10 * batch)):
        score = stream(model, text[start:], chunk=chunk)
        expected = losses_of(model, text[start:]).mean() / BIT
        assert score.bpc == pytest.approx(expected, abs=1e-6)
    tail = whole - losses_of(model, text[:-50]).sum()
    found = stream(model, text).nats - stream(model, text[:-50]).nats
    assert found == pytest.approx(tail, rel=1e-5)


@pytest.mark.parametrize("world", [2, 3, 5, 40])
@pytest.mark.parametrize("context", [0, 33, 90])
def test_shares_add_up_to_the_whole(world: int, context: int) -> None:
    model, text = tiny_model(), random_text(211)
    expected = stream(model, text, context=context)
    for chunk in (16, 64, 512):
        parts = [
            stream(model, text, context=context, chunk=chunk, rank=rank, world=world)
            for rank in range(world)
        ]
        total = sum(parts, Score())
        assert total.count == expected.count
        assert total.bpc == pytest.approx(expected.bpc, abs=1e-6)
    grid = Grid(len(text), context, 20, 6)
    one, many = score_grid(model, text, grid), score_grid(model, text, grid, world)
    assert many.count == one.count
    assert many.bpc == pytest.approx(one.bpc, abs=1e-6)


def test_only_what_is_needed_is_read_before_a_context() -> None:
    model, text = tiny_model(), random_text(400)
    with torch.inference_mode():
        score = stream(model, text, context=350, chunk=16)
    assert score.count == 50
    assert score.nats == pytest.approx(losses_of(model, text)[-50:].sum(), abs=1e-4)


def test_memory_does_not_grow_with_the_text() -> None:
    class Sized(Tally):
        largest = 0

        def add(self, nats: torch.Tensor, targets: torch.Tensor, context: range) -> None:
            super().add(nats, targets, context)
            self.largest = max(self.largest, nats.numel())

    model = tiny_model()
    for size in (200, 2000):
        tally = Sized()
        stream(model, random_text(size), chunk=50, tally=tally)
        assert tally.score.count == size - 1
        assert tally.largest == 50
