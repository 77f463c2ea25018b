"""Dropout on the CPU: against plain operations, and whether its numbers look random."""

import pytest
import torch

from lm.model import dropout as module
from lm.model.dropout import draw_seed, dropout, plain_dropout

COUNT = 400_000


def both(x, p, gradient):
    """Value and gradient of the fast one and of the plain one, for the same seed."""
    results = []
    for fast in (True, False):
        torch.manual_seed(5)
        leaf = x.detach().clone().requires_grad_()
        y = leaf.transpose(0, 1) if x.dim() > 1 else leaf
        out = dropout(y, p, training=True) if fast else plain_dropout(y, p, draw_seed())
        out.backward(gradient.transpose(0, 1) if x.dim() > 1 else gradient)
        results.append((out, leaf.grad))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3,), (64,), (65, 7), (5, 30, 2)])
@pytest.mark.parametrize("p", [0.2, 0.999999])
def test_it_is_the_plain_one_to_the_bit(monkeypatch, dtype, shape, p):
    monkeypatch.setattr(module, "PIECE", 64)
    x, gradient = torch.randn(2, *shape).to(dtype)
    (out, grad), (plain, plain_grad) = both(x, p, gradient)
    assert out.dtype == grad.dtype == dtype
    assert torch.equal(out, plain) and torch.equal(grad, plain_grad)


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5])
def test_elements_are_dropped_at_the_rate_and_one_by_one(p):
    kept = (dropout(torch.ones(COUNT), p, training=True) > 0).double()
    # Five standard deviations of a mean of independent draws.
    limit = 5 * (p * (1 - p) / COUNT) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < limit
    centred = (kept - kept.mean()) / (p * (1 - p)) ** 0.5
    for lag in (1, 2, 3, 4, 5, 8, 512, 2048):
        assert abs((centred[lag:] * centred[:-lag]).mean().item()) < 5 / COUNT**0.5, lag


def test_what_is_kept_makes_up_for_what_is_not():
    out = dropout(torch.ones(1000, dtype=torch.float64), 0.1, training=True)
    dropped = round(0.1 * 2**16) / 2**16
    assert set(out.tolist()) == {0.0, 1 / (1 - dropped)}


def test_masks_follow_the_generator_and_not_the_threads():
    x, masks, before = torch.ones(300_000), [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        masks += [dropout(x, 0.3, training=True) for _ in range(2)]
    torch.set_num_threads(before)
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])
    both_kept = ((masks[0] > 0) & (masks[1] > 0)).double().mean().item()
    assert both_kept == pytest.approx(0.7**2, abs=0.005)


def test_nothing_is_dropped_outside_training_or_at_0():
    x = torch.randn(10)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0, training=True) is x


def test_a_number_that_is_not_finite_is_not_hidden():
    assert not dropout(torch.full((100,), torch.inf), 0.5, training=True).isfinite().any()
