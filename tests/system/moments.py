"""Faults at chosen moments of a run.

Every line that lm, data or kernels execute is a moment, and so is every piece that is written of a
checkpoint. They are numbered from the start of the first stage on; what happens before changes
nothing on the disk.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lm.model.checkpoint
import lm.training.signals

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = [ROOT / name for name in ("lm", "data", "kernels")]
FIRST = "train_stage"
UNCOUNTED = "_leaves"  # runs thousands of times in each save


def kill() -> None:
    """Be gone at once, as after kill -9 or a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def send(number: signal.Signals) -> Callable[[], None]:
    """Get a signal, as from outside."""
    return lambda: signal.raise_signal(number)


terminate = send(signal.SIGTERM)


def get_stuck() -> None:
    """Be asked to end in a computation that lets the main thread react to nothing."""
    lm.training.signals.GRACE = lm.training.signals.LAST_GRACE = 0.2
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    ctypes.CDLL(None).sleep(60)


ACTIONS = {
    "kill": kill,
    "terminate": terminate,
    "interrupt": send(signal.SIGINT),
    "hang up": send(signal.SIGHUP),
    "requeue": send(signal.SIGUSR1),
    "get stuck": get_stuck,
}


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

        self._patch.setattr(lm.model.checkpoint.torch, "save", save_in_pieces)
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
            self._ours[name] = any(Path(name).is_relative_to(folder) for folder in FOLDERS)
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
        """Write `data`; half of it before the fault, the rest after one that lets go on."""
        if not self.moments.tick():
            return int(self.file.write(data))
        whole = bytes(data)
        half = len(whole) // 2
        self.file.write(whole[:half])
        self.file.flush()
        self.moments.action()
        self.file.write(whole[half:])
        return len(whole)

    def flush(self) -> None:
        """Pass on."""
        self.file.flush()


def fault_at_calls(faults: list[tuple[str, str, int, str]]) -> None:
    """Put faults at calls of functions, for good; each one waits for the one before it.

    A fault is (module, name inside of it, at which call from then on, name of the action).
    """
    due = 0

    def faulty(number: int, function: Callable[..., Any], call: int, action: str) -> Any:
        calls = 0

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, due
            calls += due == number
            if due == number and calls == call:
                due += 1
                ACTIONS[action]()
            return function(*args, **kwargs)

        return wrapper

    for number, (module, name, call, action) in enumerate(faults):
        *path, last = name.split(".")
        owner: Any = importlib.import_module(module)
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, faulty(number, getattr(owner, last), call, action))
