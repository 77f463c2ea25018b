"""Micro runs in processes of their own, forked from one that has loaded everything.

As a program it reads one line of JSON, a list of runs, and forks them all. It answers with the list
of their process ids, and when they have ended with that of their exit statuses (-9: killed); and so
on until its input ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.system.moments import ACTIONS, ROOT, Moments, fault_at_calls


@dataclass(frozen=True)
class Trial:
    """One run and its fault.

    Attributes:
        folder: of the micro run.
        changed: values of its configuration, by dotted key.
        at: the moment of the fault; -1: none.
        action: the fault's name in `moments.ACTIONS`.
        faults: others, at calls of functions; see `moments.fault_at_calls`.
        env: changes of the environment.
        shipped: the run is `micro.preset` instead.
        true_workers: other processes of the run are started as usual, not forked.
    """

    folder: str
    changed: dict[str, Any] = field(default_factory=dict)
    at: int = -1
    action: str = "kill"
    faults: list[tuple[str, str, int, str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    shipped: bool = False
    true_workers: bool = False

    @property
    def log(self) -> Path:
        """What the run prints."""
        return Path(self.folder) / f"log{self.env.get('RANK', '')}.txt"


class Nursery:
    """The loaded process, from which trials are forked."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    def run(self, *trials: Trial) -> list[int]:
        """Run them beside each other; their exit statuses."""
        self.start(*trials)
        return self.wait()

    def start(self, *trials: Trial) -> list[int]:
        """Let them begin; their process ids. `wait` has to follow."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([asdict(trial) for trial in trials]) + "\n")
        self.process.stdin.flush()
        return self.wait()

    def wait(self) -> list[int]:
        """The answer of the loaded process."""
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        assert isinstance(answer, list)
        return answer

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    """Fork what is asked for."""
    import lm.machine.device
    import lm.training.run
    import lm.training.stage

    die_with_parent()
    lm.machine.device.matrix_rate = lambda *_, **__: 1e11
    for line in sys.stdin:
        children = [fork(Trial(**values)) for values in json.loads(line)]
        sys.stdout.write(json.dumps(children) + "\n")
        sys.stdout.flush()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()


def fork(trial: Trial) -> int:
    """Start a trial; its process id."""
    child = os.fork()
    if not child:
        die_with_parent()
        os._exit(perform(trial))
    return child


def die_with_parent() -> None:
    """Leave nothing running when the tests are killed (Linux knows how)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def perform(trial: Trial) -> int:
    """Run a trial in this process; its exit status, as the command would have it."""
    log = os.open(trial.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(trial.env)
    import lm.training.processes
    from lm.config.command_line import USER_ERRORS
    from lm.training.run import train
    from tests.system.micro import micro, preset

    default_signals()
    if not trial.true_workers:
        lm.training.processes.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
            Popen=ForkedWorker, PIPE=None, TimeoutExpired=subprocess.TimeoutExpired
        )
    fault_at_calls(trial.faults)
    folder = Path(trial.folder)
    config = preset(folder) if trial.shipped else micro(folder, trial.changed)
    try:
        with Moments(trial.at, ACTIONS[trial.action]) if trial.at >= 0 else nullcontext():
            train(config)
    except SystemExit as end:
        return int(end.code or 0)
    except USER_ERRORS as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def default_signals() -> None:
    """As in a terminal: a shell ignores Ctrl-C for what it starts in the background."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ForkedWorker:
    """Stands in for subprocess.Popen of `lm.training.child_process`, and spares its imports."""

    def __init__(self, *_: Any, **__: Any) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(reader, 0)
            os.closerange(3, 1024)
            os._exit(self._work())
        os.close(reader)
        self.stdin = os.fdopen(writer, "wb")
        self._code: int | None = None
        self._lock = threading.Lock()

    def _work(self) -> int:
        import lm.training.child_process

        sys.settrace(None)
        signal.set_wakeup_fd(-1)
        default_signals()
        try:
            lm.training.child_process.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            return 70
        return 0

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or float("inf"))
        while time.monotonic() < end:
            with self._lock:
                if self._code is None:
                    ended, status = os.waitpid(self.pid, os.WNOHANG)
                    self._code = os.waitstatus_to_exitcode(status) if ended else None
                if self._code is not None:
                    return self._code
            time.sleep(0.02)
        raise subprocess.TimeoutExpired("worker", timeout or 0.0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
