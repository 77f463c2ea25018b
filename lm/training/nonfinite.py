"""Where a number that is not finite first shows: for the message that ends a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lm.errors import UserError
from lm.model.language_model import LanguageModel


class NonFiniteError(UserError):
    """A loss, a gradient or a weight is not finite, and the run cannot go on."""


def first_output(model: LanguageModel, tokens: Tensor) -> str | None:
    """The first part of the model, bottom to top, whose output for `tokens` is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not found and not torch.isfinite(output).all():
                found.append(name)

        return hook

    parts: dict[str, nn.Module] = {"the final norm": model.final_norm, "the head": model.head}
    for number, block in enumerate(model.blocks):
        parts[f"layer {number}'s attention"] = block.get_submodule("attention")
        parts[f"layer {number}"] = block
    hooks = [part.register_forward_hook(watch(name)) for name, part in parts.items()]
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the output of {found[0]}" if found else None


def first_gradient(model: LanguageModel) -> str | None:
    """The first gradient that is not finite, in backward's order: from the top layer down."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of {name}"
    return None


def refuse_weights(model: nn.Module) -> None:
    """Raise NonFiniteError if a weight is not finite."""
    for name, weight in model.state_dict().items():
        if not torch.isfinite(weight).all():
            raise NonFiniteError(f"the weights {name} are not finite")
