"""torch.compile for the dense part of the blocks: the switch trainer.compile."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryFile

import torch

from lm.errors import UserError
from lm.model.language_model import Block, LanguageModel


def check_compiler(device: str) -> None:
    """Refuse what compiling would fail for: no compiler, or a folder that cannot be written to.

    Raises:
        UserError: on a CPU without a C++ compiler that runs (on a GPU Triton comes with torch), or
            if TORCHINDUCTOR_CACHE_DIR, torch's folder for compiled programs, is of no use.
    """
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and not _runs(compiler):
        raise UserError(
            f"trainer.compile=true: on a CPU it needs a C++ compiler, and {compiler!r} does not "
            "run; install one, name it in CXX, or give trainer.compile=false"
        )
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"TORCHINDUCTOR_CACHE_DIR={folder}: {error.strerror}; for trainer.compile=true "
                "name a folder that can be written to, or unset it"
            ) from None


def _runs(compiler: str) -> bool:
    try:
        command = shlex.split(compiler)
    except ValueError:  # a quote without its other half
        return False
    if not command or shutil.which(command[0]) is None:
        return False
    done = subprocess.run(
        [*command, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return done.returncode == 0


def compile_blocks(model: LanguageModel, device: str) -> None:
    """Compile what the blocks do besides attention, for training steps; weights stay as they are.

    Attention is left out: it has kernels of its own, and a shape of r for each layer. So is dropout
    on a CPU, whose masks are not torch's (dropout.py); a GPU's is compiled, with other masks
    than without. Steps through a cache are not compiled: their lengths differ.
    """
    torch.compiler.reset()  # all blocks share a few places, which the stages before have taken
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.forward = torch.compiler.disable(block.attention.forward)  # type: ignore[method-assign]
        if device == "cpu":
            block.drop = torch.compiler.disable(block.drop)  # type: ignore[method-assign]
        block.compile(dynamic=False)
