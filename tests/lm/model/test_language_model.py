"""The model: sizes, what reaches what, and that no option changes what it should not."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from kernels import Band
from lm.config.checks import schedule_of
from lm.model.language_model import (
    LanguageModel,
    ModelConfig,
    bands,
    parameters,
)
from lm.model.positions import sinusoidal_table

SMALL = ModelConfig(layers=2, heads=2, width=16, feedforward=32, dropout=0.0)


def build(config=SMALL, band=None, **options):
    torch.manual_seed(0)
    model = LanguageModel(config, band or [Band(3, (1, 2)), Band(2, (1, 3))], **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(("size", "millions"), [("small", 41.08), ("large", 102.51)])
def test_parameters_of_the_papers_models(size, millions, compose):
    config = compose(f"experiment=enwik8_{size}")
    with torch.device("meta"):
        model = LanguageModel(config.model, bands(schedule_of(config)[1]))
    counted = sum(p.numel() for p in model.parameters())
    assert counted == parameters(config.model)
    assert counted / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    "changed",
    [
        {"tie_embedding": False},
        {"attention_bias": True},
        {"output_bias": False},
        {"final_norm": False},
        {"share_position_biases": False},
    ],
)
def test_the_parameter_formula_follows_each_option(changed):
    config = dataclasses.replace(SMALL, **changed)
    counted = sum(p.numel() for p in build(config).parameters())
    assert counted == parameters(config) != parameters(SMALL)


def test_initial_values_are_those_of_the_docstring():
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, width=64, feedforward=128)
    model = LanguageModel(config, [Band(3, (1, 1))] * 2)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert torch.equal(p, torch.full_like(p, name.endswith("weight")))
        elif name.endswith("bias") and "_bias" not in name:
            assert not p.any(), name
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.25), name
            assert abs(p.mean().item()) < 0.02, name


def influence(model, positions):
    """Which outputs depend on which inputs: [output, input]."""
    x = torch.randn(1, positions, 16, dtype=torch.float64, requires_grad=True)
    h = x
    for layer, block in enumerate(model.blocks):
        h = block(h, model.table, *model.position_biases(layer))
    rows = [
        torch.autograd.grad(h[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1)
        for i in range(positions)
    ]
    return torch.stack(rows) > 0


@pytest.mark.parametrize("strides", [(1, 1), (1, 2), (3, 3)])
def test_a_layer_sees_exactly_its_band(strides):
    config = dataclasses.replace(SMALL, layers=1, backend="dense")
    model = build(config, [Band(2, strides)]).double()
    seen = influence(model, 9)
    for i in range(9):
        expected = {i - d * s for s in strides for d in range(3) if i - d * s >= 0}
        assert set(seen[i].nonzero().flatten().tolist()) == expected


def test_the_receptive_field_is_the_sum_of_reaches():
    model = build(dataclasses.replace(SMALL, backend="dense")).double()
    seen = influence(model, 20)
    assert int(seen[19].nonzero()[0]) == 19 - (3 * 2 + 2 * 3)
    assert not seen.triu(1).any()


def test_gradient_checkpointing_changes_no_gradient():
    config = dataclasses.replace(SMALL, dropout=0.3, attention_dropout=0.2)
    tokens = torch.randint(256, (2, 12))
    results = []
    for checkpointing in (False, True):
        model = build(config, gradient_checkpointing=checkpointing).train()
        torch.manual_seed(7)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        results.append((loss, {n: p.grad for n, p in model.named_parameters()}))
    (loss, grads), (loss_again, grads_again) = results
    assert torch.equal(loss, loss_again)
    for name, grad in grads.items():
        assert grad is not None and grad.abs().sum() > 0, name
        assert torch.equal(grad, grads_again[name]), name


def test_autocast_keeps_attention_and_logits_in_float32():
    model = build().train()
    tokens = torch.randint(256, (1, 12))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.blocks[0].attention.distance_keys(model.table, 12).dtype == torch.float32
        logits = model(tokens)
    assert logits.dtype == torch.float32
    logits.square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert (logits - model(tokens)).abs().max() < 0.2


def test_relative_terms_use_true_distances_or_steps():
    model = build(band=[Band(3, (1, 2)), Band(2, (1, 3))])
    attention = model.blocks[0].attention
    r = attention.distance_keys(model.table, 100)
    assert r.shape == (2, 4, 8)
    weight = attention.r.weight.view(2, 8, 16)
    table = sinusoidal_table(7, 16)
    for head, stride in enumerate((1, 2)):
        for delta in range(4):
            torch.testing.assert_close(r[head, delta], weight[head] @ table[delta * stride])
    attention.unit = "steps"
    torch.testing.assert_close(
        attention.distance_keys(model.table, 100)[1], table[:4] @ weight[1].T
    )


def test_heads_of_any_order_keep_their_own_distances():
    config = dataclasses.replace(SMALL, heads=4)
    model = build(config, [Band(2, (3, 1, 2, 1))] * 2)
    r = model.blocks[0].attention.distance_keys(model.table, 50)
    weight = model.blocks[0].attention.r.weight.view(4, 4, 16)
    for head, stride in enumerate((3, 1, 2, 1)):
        torch.testing.assert_close(r[head, 2], weight[head] @ model.table[2 * stride])


def test_windows_beyond_the_sequence_cost_nothing_more():
    model = build(band=[Band(1000, (1, 1))] * 2)
    assert model.blocks[0].attention.distance_keys(model.table, 5).shape == (2, 5, 8)


def test_weights_pass_from_stage_to_stage_unchanged():
    first, second = build(), build(band=[Band(6, (1, 2)), Band(4, (1, 3))])
    second.load_state_dict(first.state_dict())
    tokens = torch.randint(256, (1, 3))
    torch.testing.assert_close(first.eval()(tokens), second.eval()(tokens))
