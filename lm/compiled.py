"""torch.compile for the dense part of the blocks: the switch trainer.compile."""

from __future__ import annotations

import os
import shutil

import torch

from lm.errors import UserError
from lm.model import Block, LanguageModel


def check_compiler(device: str) -> None:
    """Refuse a device for which nothing can be compiled here.

    Raises:
        UserError: on a CPU without a C++ compiler; on a GPU Triton comes with torch.
    """
    compiler = os.environ.get("CXX") or "g++"
    if device == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            f"trainer.compile=true: on a CPU it needs a C++ compiler, and {compiler!r} was not "
            "found; install one, name it in CXX, or give trainer.compile=false"
        )


def compile_blocks(model: LanguageModel, device: str) -> None:
    """Compile what the blocks do besides attention, for training steps; weights stay as they are.

    Attention is left out: it has kernels of its own, and a shape of r for each layer. So is dropout
    on a CPU, whose masks are not torch's (lm/dropout.py); a GPU's is compiled, with other masks
    than without. Steps through a cache are not compiled: their lengths differ.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.forward = torch.compiler.disable(block.attention.forward)  # type: ignore[method-assign]
        if device == "cpu":
            block.drop = torch.compiler.disable(block.drop)  # type: ignore[method-assign]
        block.compile(dynamic=False)
