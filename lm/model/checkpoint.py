"""Checkpoints: plain values and tensors in one file, whole or absent, and verified when read.

A checkpoint is a dictionary::

    format      version of this layout
    model       fields of lm.model.language_model.ModelConfig
    stage       fields of lm.schedule.Stage
    step        optimiser steps done in this stage
    config      the run's configuration (plain values)
    data        name, and sha256 of each split
    bpc         validation result that made it the best, or None
    weights     the model's state
    optimizer   AdamW's state, or None (best.ckpt holds weights only)
    counters    what the training loop counts across a resume
    scaler      fp16 loss scaler's state, or None
    digest      sha256 over all of the above

It is read with `weights_only=True`: nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lm.errors import UserError
from lm.machine.files import replacing
from lm.model.language_model import LanguageModel, ModelConfig, bands
from lm.schedule import Stage

FORMAT = 1
KEYS = (
    "format",
    "model",
    "stage",
    "step",
    "config",
    "data",
    "bpc",
    "weights",
    "optimizer",
    "counters",
    "scaler",
    "digest",
)


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file."""


class DamagedError(CheckpointError):
    """A checkpoint of which a part is missing or has changed."""


def save_checkpoint(path: Path, content: Mapping[str, Any], keep: Path | None = None) -> None:
    """Write `content`, all keys of the layout but format and digest; or raise WriteError.

    With `keep`, the checkpoint that was at `path` is kept under that name.
    """
    whole = {"format": FORMAT, **content}
    whole["digest"] = _digest(whole)
    with replacing(path, keep) as file:
        torch.save(whole, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint; tensors land on the CPU.

    Raises:
        DamagedError: if the file is truncated, changed, or no checkpoint at all.
        CheckpointError: if it is missing, not of this project, or of another format.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file")
    damaged = f"{path}: truncated, damaged or not a checkpoint"
    if not zipfile.is_zipfile(path):
        raise DamagedError(f"{damaged} (no zip archive){_advice(path)}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        OSError,
        RuntimeError,
        EOFError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise DamagedError(f"{damaged} ({reason}){_advice(path)}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path}: not a checkpoint of this project (no format version)")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {content['format']}, this version reads {FORMAT}"
        )
    if missing := [key for key in KEYS if key not in content]:
        raise CheckpointError(f"{path}: not a whole checkpoint, it lacks {', '.join(missing)}")
    digest = content.pop("digest")
    if digest != _digest(content):
        raise DamagedError(f"{path}: damaged, its sha256 does not match{_advice(path)}")
    return cast(dict[str, Any], content)


def _advice(path: Path) -> str:
    before = path.with_name("previous.ckpt")
    return f"; {before} is the one before it" if before != path and before.exists() else ""


def stage_of(checkpoint: Mapping[str, Any]) -> Stage:
    """The stage in which the checkpoint was made."""
    table = dict(checkpoint["stage"])
    table["windows"] = tuple(table["windows"])
    table["strides"] = tuple(tuple(s) for s in table["strides"])
    return Stage(**table)


def model_config_of(checkpoint: Mapping[str, Any]) -> ModelConfig:
    """The configuration of the checkpoint's model."""
    known = {field.name for field in fields(ModelConfig)}
    return ModelConfig(**{k: v for k, v in checkpoint["model"].items() if k in known})


def build_model(
    checkpoint: Mapping[str, Any],
    *,
    stage: Stage | None = None,
    backend: str | None = None,
) -> LanguageModel:
    """The checkpoint's model with its weights, in evaluation mode.

    Args:
        checkpoint: from `load_checkpoint`.
        stage: whose windows it gets; the checkpoint's own if not given.
        backend: of the attention; the checkpoint's own if not given.

    Raises:
        CheckpointError: if names or shapes of the weights are not those of the model.
    """
    config = model_config_of(checkpoint)
    if backend is not None:
        config.backend = backend
    model = LanguageModel(config, bands(stage or stage_of(checkpoint)))
    load_weights(model, checkpoint)
    return model.eval()


def load_weights(model: LanguageModel, checkpoint: Mapping[str, Any]) -> None:
    """Give `model` the checkpoint's weights; every name and shape has to match."""
    expected, found = model.state_dict(), checkpoint["weights"]
    wrong = sorted(expected.keys() ^ found.keys()) or [
        name for name, weight in expected.items() if weight.shape != found[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint's weights do not fit the model: {wrong[0]} (and {len(wrong) - 1} more)"
        )
    model.load_state_dict(found)


def _digest(content: Mapping[str, Any]) -> str:
    """sha256 over every key, plain value and tensor, in sorted order."""
    digest = hashlib.sha256()
    for name, value in _leaves("", content):
        digest.update(name.encode())
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            digest.update(json.dumps(value).encode())
    return digest.hexdigest()


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(f"{path}/{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}/{index}", item)
    else:
        yield path, value
