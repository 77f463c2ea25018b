"""Faults at chosen moments of a run.

Every line that lm, data or kernels execute is a moment, and so is every piece that is written of a
checkpoint. They are numbered from the start of the first stage on; what happens before changes
nothing on the disk.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lm.checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("lm", "data", "kernels")
FIRST = "train_stage"
UNCOUNTED = "_leaves"  # runs thousands of times in each save


def kill() -> None:
    """Be gone at once, as after kill -9 or a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    """Be asked to end."""
    signal.raise_signal(signal.SIGTERM)


class Moments:
    """Counts the moments of what runs inside `with`; does `action` at number `at`."""

    def __init__(self, at: int = -1, action: Callable[[], None] = kill) -> None:
        self.at = at
        self.action = action
        self.count = 0
        self.begun = False
        self._ours: dict[str, bool] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Moments:
        save = torch.save

        def save_in_pieces(content: Any, file: Any) -> None:
            save(content, Pieces(file, self))

        self._patch.setattr(lm.checkpoint.torch, "save", save_in_pieces)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._patch.undo()

    def tick(self) -> bool:
        """Whether this is the moment."""
        self.count += 1
        return self.count == self.at

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if name not in self._ours:
            folder = Path(name).parent
            self._ours[name] = folder.parent == ROOT and folder.name in FOLDERS
        self.begun = self.begun or function == FIRST
        wanted = self.begun and self._ours[name] and function != UNCOUNTED
        return self._line if wanted else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and self.tick():
            self.action()
        return self._line


class Pieces:
    """A file in which a write may end half-way."""

    def __init__(self, file: Any, moments: Moments) -> None:
        self.file = file
        self.moments = moments

    def write(self, data: Any) -> int:
        """Write `data`, or half of it before the fault."""
        if self.moments.tick():
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()
            self.moments.action()
        return int(self.file.write(data))

    def flush(self) -> None:
        """Pass on."""
        self.file.flush()
