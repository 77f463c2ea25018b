"""Where the time of a training step goes: a table by kind of work, and a trace of every call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from lm.files import write_text
from lm.module import TrainingModule

# Kinds of work and the operators that begin with these names; the first that fits is taken.
KINDS = {
    "banded attention": ("_Attention", "_Chunks", "_Loop", "kernels::"),
    "optimiser": ("aten::_fused_adam", "aten::_foreach_add", "aten::_foreach_addc"),
    "gradient clipping": ("aten::_foreach_norm", "aten::_foreach_mul", "aten::linalg_vector_norm"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm"),
    "dropout": ("aten::dropout", "aten::native_dropout", "aten::bernoulli", "NativeDropout"),
    "gelu": ("aten::gelu",),
    "layer norm": ("aten::native_layer_norm", "aten::layer_norm"),
    "loss": ("aten::_log_softmax", "aten::nll_loss", "aten::log_softmax", "aten::cross_entropy"),
    "embedding": ("aten::embedding",),
    "casts and copies": ("aten::copy_", "aten::_to_copy", "aten::contiguous", "aten::clone"),
    "sums and products": ("aten::add", "aten::mul", "aten::sum", "aten::div"),
    "processes": ("c10d::", "gloo::", "nccl::"),
}
OTHER = "everything else"


@dataclass
class Breakdown:
    """Seconds per step by kind of work, and what the clock says of the whole step."""

    seconds: float
    kinds: dict[str, float] = field(default_factory=dict)

    def share(self, kind: str) -> float:
        """Part of the step's time, from 0 to 1."""
        return self.kinds.get(kind, 0.0) / self.seconds

    def table(self) -> str:
        """Readable lines, the largest first; time in no operator is Python's and waiting."""
        rows = sorted(self.kinds.items(), key=lambda item: -item[1])
        rows.append(("outside of operators", self.seconds - sum(self.kinds.values())))
        lines = [f"{'kind of work':<22}{'s/step':>10}{'share':>8}"]
        lines += [f"{kind:<22}{s:>10.4f}{s / self.seconds:>8.1%}" for kind, s in rows]
        return "\n".join([*lines, f"{'one step':<22}{self.seconds:>10.4f}{1:>8.1%}"])


class Profile(pl.Callback):
    """Records whole optimiser steps, from number `first` of this run on.

    Args:
        first: how many steps to leave out, which warm up.
        steps: how many to record.
        folder: where profile.txt and trace.json go; None: only `breakdown` is kept.
    """

    def __init__(self, first: int, steps: int, folder: Path | None = None) -> None:
        self.first = first
        self.steps = steps
        self.folder = folder
        self.breakdown: Breakdown | None = None
        self._profile: profile | None = None
        self._origin: int | None = None
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Begin to record, if it is time to."""
        assert isinstance(pl_module, TrainingModule)
        if self._origin is None:
            self._origin = pl_module.step
        due = pl_module.between_steps and pl_module.step == self._origin + self.first
        if due and self.breakdown is None and trainer.is_global_zero:
            kinds = [ProfilerActivity.CPU]
            if pl_module.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=kinds)
            self._profile.start()
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Stop after the last of the recorded steps."""
        assert isinstance(pl_module, TrainingModule) and self._origin is not None
        if self._profile is None or not pl_module.between_steps:
            return
        last = pl_module.step == pl_module.stage.steps
        if pl_module.step < self._origin + self.first + self.steps and not last:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        done = pl_module.step - self._origin - self.first
        recorded, self._profile = self._profile, None
        recorded.stop()
        on_gpu = pl_module.device.type == "cuda"
        self.breakdown = break_down(recorded.events(), seconds / done, done, on_gpu=on_gpu)
        if self.folder is not None:
            self._write(recorded, on_gpu)

    def _write(self, recorded: profile, on_gpu: bool) -> None:
        assert self.folder is not None and self.breakdown is not None
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        calls = recorded.key_averages().table(sort_by=order, row_limit=40)
        write_text(self.folder / "profile.txt", f"{self.breakdown.table()}\n\n{calls}\n")
        recorded.export_chrome_trace(str(self.folder / "trace.json"))


def break_down(
    events: Iterable[FunctionEvent], seconds: float, steps: int, *, on_gpu: bool = False
) -> Breakdown:
    """Add up the time of `steps` recorded steps by kind of work.

    An operator's own time goes to the outermost operator above it that has a kind, so that what
    banded attention calls counts as attention.
    """
    kinds: dict[str, float] = defaultdict(float)
    for event in events:
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if own > 0:
            kinds[_kind_of(event)] += own / 1e6 / steps
    return Breakdown(seconds, dict(kinds))


def _kind_of(event: FunctionEvent) -> str:
    found = OTHER
    above: FunctionEvent | None = event
    while above is not None:
        name = above.name.removeprefix("autograd::engine::evaluate_function: ")
        for kind, prefixes in KINDS.items():
            if name.startswith(prefixes):
                found = kind
                break
        above = above.cpu_parent
    return found
