"""One character at a time gives what one forward pass over the whole text gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lm.model.single_step import Stepper
from lm.model.stream import StreamState
from tests.lm.evaluation_cases import (
    STAGE,
    assert_same_logits,
    exact_model,
    random_text,
    tiny_model,
    tokens_of,
)

KINDS: list[dict[str, object]] = [
    {},
    {"final_norm": False, "scale_embedding": False},
    {"tie_embedding": False, "output_bias": False, "attention_bias": True},
    {"share_position_biases": False, "position_unit": "steps"},
]


@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.parametrize("prompt", [0, 1, 50])
def test_steps_continue_a_text(changes: dict[str, object], prompt: int) -> None:
    model, text = exact_model(**changes), random_text(90)
    with torch.inference_mode():
        expected = model(tokens_of(text))[0]
    state = StreamState(model)
    if prompt:
        state.advance(tokens_of(text[:prompt]))
    stepper = Stepper(state)
    found = torch.stack([stepper.step(int(byte)) for byte in text[prompt:]])
    assert_same_logits(found, expected[prompt:])
    assert state.position == 90


@pytest.mark.parametrize("strides", [(1, 2, 1, 3), (2, 2, 2, 2), (3, 1, 1, 1)])
def test_any_order_of_strides(strides: tuple[int, ...]) -> None:
    stage = replace(STAGE, windows=(0, 4, 50), strides=(strides,) * 3)
    model, text = exact_model(stage, heads=4), random_text(70)
    with torch.inference_mode():
        expected = model(tokens_of(text))[0]
    stepper = Stepper(StreamState(model))
    found = torch.stack([stepper.step(int(byte)) for byte in text])
    assert_same_logits(found, expected)


def test_the_same_steps_give_the_same_bits() -> None:
    model, text = tiny_model(), random_text(200)
    runs = []
    for _ in range(2):
        stepper = Stepper(StreamState(model))
        runs.append(torch.stack([stepper.step(int(byte)) for byte in text]))
    assert torch.equal(*runs)


def test_several_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="reads 2 texts"):
        Stepper(StreamState(tiny_model(), batch=2))
