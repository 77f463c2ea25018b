"""Which characters a step reads, and what the optimiser does with them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.config.schema import OptimConfig
from lm.model.language_model import LanguageModel, ModelConfig, bands
from lm.schedule import Stage
from lm.training.module import Crops, TrainingModule
from lm.training.optimizer import build_optimizer, set_learning_rate

TEXT = np.arange(5_000, dtype=np.uint64).astype(np.uint8)


def stage(batch=8, steps=5, sequence=16):
    return Stage(1, sequence, (2,), ((1, 2),), 1e-2, batch, steps, 0)


def read(micro_batch, rank, world, first_step=0, **options):
    crops = Crops(
        TEXT,
        stage(**options),
        seed=3,
        first_step=first_step,
        micro_batch=micro_batch,
        rank=rank,
        world=world,
    )
    return [batch.numpy() for batch in crops]


@given(
    micro=st.sampled_from([1, 2, 4]),
    world=st.sampled_from([1, 2]),
    first_step=st.integers(0, 5),
)
def test_any_cut_of_the_batch_reads_the_same_characters(micro, world, first_step):
    whole = read(8, 0, 1)
    parts = [read(micro, rank, world, first_step) for rank in range(world)]
    pieces = 8 // (micro * world)
    assert all(len(part) == pieces * (5 - first_step) for part in parts)
    for step in range(first_step, 5):
        at = (step - first_step) * pieces
        joined = [part[at + piece] for piece in range(pieces) for part in parts]
        np.testing.assert_array_equal(np.concatenate(joined), whole[step])


def test_steps_differ_and_a_crop_has_one_more_than_the_sequence():
    batches = read(8, 0, 1)
    assert batches[0].shape == (8, 17)
    assert not any(np.array_equal(a, b) for a, b in itertools.pairwise(batches))


def model():
    config = ModelConfig(layers=1, heads=2, width=16, feedforward=32)
    return LanguageModel(config, bands(stage()))


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_which_parameters_are_decayed(decay):
    network = model()
    optimizer = build_optimizer(network, OptimConfig(decay=decay), stage())
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    for name, p in network.named_parameters():
        matrix = p.dim() == 2
        assert (id(p) in decayed) == (matrix or decay == "all"), name
    rates = [group["weight_decay"] for group in optimizer.param_groups]
    assert rates == ([0.01, 0.0] if decay == "matrices" else [0.01])
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(network.parameters()))


def test_the_optimiser_is_adamw_by_its_formula():
    network = model()
    optimizer = build_optimizer(network, OptimConfig(eps=1e-6), stage())
    weight = network.blocks[0].inner.weight
    before = weight.detach().double().clone()
    gradient = torch.randn_like(weight)
    weight.grad = gradient.clone()
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    update = gradient.double() / (gradient.double().abs() + 1e-6)
    torch.testing.assert_close(
        weight.detach().double(), before * (1 - 0.1 * 0.01) - 0.1 * update, atol=1e-6, rtol=0
    )


def test_without_gradients_nothing_moves():
    network = model()
    optimizer = build_optimizer(network, OptimConfig(), stage())
    before = [p.detach().clone() for p in network.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert not optimizer.state


def test_gradients_are_gone_after_the_step():
    network = model()
    module = TrainingModule(network, stage(), OptimConfig(), TEXT, seed=3, micro_batch=8)
    optimizer = build_optimizer(network, OptimConfig(), stage())
    before = network.head.weight.detach().clone()

    def closure():
        loss = network(torch.randint(256, (1, 16))).square().sum()
        loss.backward()
        return loss

    module.optimizer_step(0, 0, optimizer, closure)
    assert module.step == 1 and not torch.equal(before, network.head.weight)
    assert all(p.grad is None for p in network.parameters())
