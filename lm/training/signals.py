"""How a run ends before its time, on a signal or with another process, and loses no step.

The state at the last step border (weights, optimiser, counters) does not change while the next
step is computed, so a run may be stopped anywhere there: `Stopped` is raised, the unfinished step
is dropped and the border is saved (see `saving`). Only between the end of a step's arithmetic
and the end of its border's work is the state half changed; there the wish to stop is held back.

Lightning looks at SIGTERM between two batches only, saves nothing and exits with 0; of the other
signals it knows Slurm's alone (docs/deviations.md).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lm.errors import UserError

GRACE = 20.0  # seconds for the main thread to react, which it cannot while a kernel runs
LAST_GRACE = 5.0  # seconds for what holds the lock then, which may wait for ever for a process
REQUEUE = (signal.SIGUSR1, signal.SIGUSR2)


class Stopped(BaseException):
    """The run has to end now; `code` is the exit status."""

    def __init__(self, reason: str, code: int, requeue: signal.Signals | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.requeue = requeue


class Stop:
    """The wish to end a run, and when it takes effect.

    Attributes:
        wanted: why the run has to end, once it has to.
        save: writes the last step border if that is not done yet; None outside of training. It is
            called by whoever has the lock.
    """

    def __init__(self) -> None:
        self.wanted: Stopped | None = None
        self.save: Callable[[], None] | None = None
        self.lock = threading.RLock()
        self._held = False
        self._raised = False

    def hold(self) -> None:
        """From here on the state is half changed: let nothing end the run."""
        self._held = True
        self.lock.acquire()

    def release(self) -> None:
        """The state is whole again: end the run now if that was asked for meanwhile."""
        self.lock.release()
        self._held = False
        self.check()

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Between hold and release: a stretch of work that may be cut short."""
        self.release()
        yield
        self.hold()

    def check(self) -> None:
        """Raise Stopped if the run has to end; also where an earlier raise was swallowed."""
        if self.wanted is not None:
            self._raised = True
            raise self.wanted

    def ask(self, reason: Stopped) -> None:
        """In the main thread: end the run for this reason (the first one counts), once it may."""
        if self.wanted is None:
            self.wanted = reason
        if not self._held and not self._raised:
            self.check()

    def ask_main_thread(self, reason: Stopped) -> None:
        """In another thread: the same, by a signal that makes the main thread look up."""
        if self.wanted is None:
            self.wanted = reason
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)


class Signals:
    """While it is entered, signals ask `stop` to end the run.

    They are Ctrl-C, SIGTERM, the loss of the terminal, and under Slurm SIGUSR1 and SIGUSR2, which
    also requeue the job; signals that were ignored stay so. A second Ctrl-C ends the process at
    once, without saving; what is on the disk stays whole. A main thread that is deep in a
    computation cannot react: after `GRACE` seconds a thread saves in its place.

    Attributes:
        first: whether this is the first process. The others have nothing to save: they go on until
            the first one ends the run, and leave by themselves if it does not.
        noted: the signal that came to another than the first process.
    """

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.first = True
        self.noted: Stopped | None = None
        self.before: dict[int, Any] = {}
        self._closed = threading.Event()
        self._asked = False

    def __enter__(self) -> Signals:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if "SLURM_JOB_ID" in os.environ:
            numbers += REQUEUE
        for number in numbers:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup, or a job in the background
                self.before[number] = before
        self.install()
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def install(self) -> None:
        """Put the handlers in place (again: Lightning sets its own)."""
        for number in self.before:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def requeue(self, stopped: Stopped) -> None:
        """Let Slurm start the job again, if its signal ended the run.

        A handler that was there before (of a launcher that requeues in its own way) is preferred.

        Raises:
            UserError: if Slurm does not take the job back.
        """
        if stopped.requeue is None or not self.first:
            return
        before = self.before[stopped.requeue]
        if callable(before):
            before(stopped.requeue, None)
            return
        job = os.environ["SLURM_JOB_ID"]
        if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        try:
            subprocess.run(["scontrol", "requeue", job], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"the run is saved, but scontrol requeue {job} failed ({error}); submit it again "
                "with the same command"
            ) from error

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._asked = self._asked or number == signal.SIGINT or self.stop.wanted is None
        if self.first:
            self.stop.ask(stopped_by(number))
        else:
            self.noted = stopped_by(number)

    def _watch(self, reader: int) -> None:
        """See signals when they come, also while the main thread runs no Python code."""
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while data := numbers.read(1):
                if data[0] in self.before and not self._closed.wait(GRACE):
                    self._end_from_here(data[0])

    def _end_from_here(self, number: int) -> None:
        reason = self.stop.wanted or stopped_by(number)
        code = reason.code
        where = "in the middle of a computation"
        if self.stop.lock.acquire(timeout=LAST_GRACE):
            try:
                if self.stop.save is not None:
                    self.stop.save()
                self.requeue(reason)
            except UserError as error:
                sys.stderr.write(f"error: {error}\n")
                code = 1
        else:
            where = "between two steps, which did not end; what was saved before is whole"
        sys.stderr.write(f"stopped by {reason} {where}\n")
        sys.stderr.flush()
        os._exit(code)


def stopped_by(number: int) -> Stopped:
    """The end that a signal asks for."""
    name = signal.Signals(number)
    return Stopped(name.name, 128 + number, name if name in REQUEUE else None)
