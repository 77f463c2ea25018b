"""From `run=NAME` or `ckpt=PATH` to a model, and to the corpus that it is measured on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.backends import choose_backend
from kernels.band import Band
from kernels.call import make_call
from lm.config.command_schemas import ComputeConfig, SourceConfig
from lm.config.schema import ConfigError
from lm.machine.device import Device, choose_device
from lm.model.checkpoint import build_model, load_checkpoint
from lm.model.language_model import LanguageModel


@dataclass(frozen=True)
class Source:
    """A verified checkpoint, where it lies, and the folder of the run that it was asked for by."""

    path: Path
    checkpoint: Mapping[str, Any]
    run_folder: Path | None

    @property
    def label(self) -> str:
        """The run's name, stage and step."""
        name = self.checkpoint["config"].get("name", self.path.name)
        number = self.checkpoint["stage"]["number"]
        return f"{name}, stage {number}, step {self.checkpoint['step']}"


def open_source(config: SourceConfig) -> Source:
    """Find and read the checkpoint.

    Raises:
        ConfigError: if the run has no finished stage. CheckpointError: if it cannot be read.
    """
    if config.ckpt:
        path = Path(config.ckpt)
        return Source(path, load_checkpoint(path), None)
    folder = Path(config.runs_dir) / config.run
    path = best_checkpoint(folder, config.stage)
    return Source(path, load_checkpoint(path), folder)


def best_checkpoint(folder: Path, stage: int | None = None) -> Path:
    """best.ckpt of the run's highest finished stage, or of the finished stage asked for."""
    states = {}
    for path in folder.glob("stage*/state.json"):
        number = path.parent.name.removeprefix("stage")
        if number.isdecimal():
            states[int(number)] = read_state(path)
    if not states:
        where = folder.parent
        known = sorted({p.parent.parent.name for p in where.glob("*/stage*/state.json")})
        hint = f"there are {', '.join(known)}" if known else "there are no runs"
        raise ConfigError(f"run={folder.name}: no stage found in {folder}; in {where} {hint}")
    finished = [number for number, state in states.items() if state["finished"]]
    if not finished or (stage is not None and stage not in finished):
        key = f"run={folder.name}" + ("" if stage is None else f", stage={stage}")
        table = ", ".join(
            f"stage {number} at step {state['step']} of {state['steps']}"
            for number, state in sorted(states.items())
        )
        raise ConfigError(
            f"{key}: not a finished stage (found {table}); train it to its end, or give "
            f"ckpt=PATH of a checkpoint in {folder}"
        )
    chosen = max(finished) if stage is None else stage
    return folder / f"stage{chosen}" / "checkpoints" / "best.ckpt"


def read_state(path: Path) -> dict[str, Any]:
    """A stage's state.json."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {name: state[name] for name in ("step", "steps", "finished")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: damaged ({error}); train.py with this run's settings writes it anew, or give "
            "ckpt=PATH of a checkpoint"
        ) from error


def open_model(source: Source, device: Device, backend: str) -> LanguageModel:
    """The checkpoint's model in evaluation mode, on the device."""
    return build_model(source.checkpoint, backend=backend or None).to(device.kind)


def compute_device(config: ComputeConfig) -> Device:
    """The device to compute on; float32 products are exact, without TF32."""
    torch.set_float32_matmul_precision("highest")
    return choose_device(config.accelerator, config.precision, config.threads)


def autocast(device: Device) -> torch.autocast:
    """The context in which a model runs in the device's precision."""
    dtype = torch.float16 if device.precision == "16-mixed" else torch.bfloat16
    return torch.autocast(device.kind, dtype=dtype, enabled=device.precision != "32-true")


def backend_taken(model: LanguageModel) -> str:
    """Name of the attention backend that runs the model where it is."""
    heads = model.config.heads
    q = torch.zeros(1, 1, heads, model.config.width // heads, device=model.embedding.weight.device)
    return choose_backend(make_call(q, q, q, Band(0, (1,) * heads)), model.config.backend)[0]


def model_sha256(model: LanguageModel) -> str:
    """sha256 of all that decides the model's predictions: weights, configuration and bands."""
    facts = asdict(model.config) | {"backend": ""}
    facts["bands"] = [asdict(block.attention.band) for block in model.blocks]  # type: ignore[union-attr, arg-type]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
