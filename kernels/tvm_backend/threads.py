"""A crew of Python threads that run kernels, which release the interpreter's lock.

The thread that asks works too, and helpers join it: torch.get_num_threads() - 1 of them, read at
each call. Helpers are daemon threads that sleep on a queue; they start when they are first needed,
and anew in the child after a fork. Several threads may ask at once: each does its own jobs if no
helper is free, so nothing waits for ever.

torch's own threads must not spin while they have nothing to do: they would hold the cores that the
helpers need. OpenMP reads how its threads wait when torch is imported, so the policy is set before
that (kernels/__init__.py), and where it could not be, it is said once.
"""

import functools
import itertools
import logging
import math
import os
import queue
import threading
from collections.abc import Callable

import torch

Job = Callable[[int], None]

WORTH_WAKING = 5e6  # multiplications and additions, about 0.1 ms, that repay waking a helper
_logger = logging.getLogger("longchar.kernels")


class _Crew:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.invitations: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.helpers = 0

    def invite(self, helpers: int, work: Callable[[], None]) -> None:
        with self.lock:
            while self.helpers < helpers:
                self.helpers += 1
                name = f"longchar-kernels-{self.helpers}"
                threading.Thread(target=self._help, name=name, daemon=True).start()
        for _ in range(helpers):
            self.invitations.put(work)

    def _help(self) -> None:
        while True:
            self.invitations.get()()


class _Jobs:
    """The jobs of one call and how far they are.

    A worker lets go of everything it works with before it counts as done, and a late one finds
    nothing: a helper that frees tensors while the interpreter shuts down would end the process.
    """

    def __init__(self, count: int, prepare: Callable[[], Job], failed: Callable[[], None]) -> None:
        self.count, self.failed = count, failed
        self.prepare: Callable[[], Job] | None = prepare
        self.claims = itertools.count()  # next() on it is atomic
        self.changed = threading.Condition()
        self.working = 0
        self.error: BaseException | None = None

    def work(self) -> None:
        """Claim and do jobs until none is left or one has failed."""
        with self.changed:
            if self.prepare is None:
                return
            self.working += 1
        try:
            self._do_claimed(self.prepare)
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that asked)
            self._fail(error)
        finally:
            with self.changed:
                self.working -= 1
                self.changed.notify_all()

    def _do_claimed(self, prepare: Callable[[], Job]) -> None:
        claim = next(self.claims)
        job = prepare() if claim < self.count else None
        while job is not None and claim < self.count and self.error is None:
            job(claim)
            claim = next(self.claims)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.failed()

    def wait(self) -> None:
        """Return, or raise what failed, when nobody works any more; also after Ctrl-C."""
        while self.prepare is not None:
            try:
                with self.changed:
                    self.changed.wait_for(lambda: self.working == 0)
                    self.prepare = None
            except BaseException as error:  # noqa: BLE001 (raised when the others have stopped)
                self._fail(error)
        if self.error is not None:
            raise self.error


class Turns:
    """Lets several workers do a part of their jobs in a fixed order, per lane."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: dict[int, int] = {}
        self._broken = False

    def take(self, lane: int, turn: int, act: Callable[[], None]) -> None:
        """Do `act` after all earlier turns of the lane. Their claimers must be at work already."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._next.get(lane, 0) == turn)
            if self._broken:
                raise RuntimeError("an earlier part of this call has failed")
        act()
        with self._changed:
            self._next[lane] = turn + 1
            self._changed.notify_all()

    def break_off(self) -> None:
        """Wake all that wait: a job has failed and its turn will never come."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


_crew: _Crew | None = None
_crew_lock = threading.Lock()
_fork_is_watched = False


def spread(
    count: int,
    prepare: Callable[[], Job],
    failed: Callable[[], None] = lambda: None,
    work: float = math.inf,
) -> None:
    """Do the jobs 0 .. count - 1, claimed in this order, on torch.get_num_threads() threads.

    On fewer if `work`, the number of multiplications and additions in all jobs, is small.

    Each thread that takes part calls `prepare` once and then what it returned with each job that it
    claims. Raises what the first failing job raised, after all threads have stopped; `failed` is
    called as soon as a job or its preparation fails, to wake jobs that wait for another.
    """
    threads = min(torch.get_num_threads(), count, 1 + work / WORTH_WAKING)
    if threads < 2:
        _do_alone(count, prepare, failed)
        return
    jobs = _Jobs(count, prepare, failed)
    _the_crew().invite(int(threads) - 1, jobs.work)
    jobs.work()
    jobs.wait()


def _do_alone(count: int, prepare: Callable[[], Job], failed: Callable[[], None]) -> None:
    if count == 0:
        return
    try:
        job = prepare()
        for number in range(count):
            job(number)
    except BaseException:
        failed()
        raise


def _the_crew() -> _Crew:
    global _crew, _fork_is_watched  # noqa: PLW0603 (threads belong to the process)
    with _crew_lock:
        if not _fork_is_watched:
            os.register_at_fork(after_in_child=_forget)
            _fork_is_watched = True
        if _crew is None:
            _warn_of_spinning()
            _crew = _Crew()
        return _crew


@functools.cache
def _warn_of_spinning() -> None:
    """Say once if torch's threads hold the cores that helpers need."""
    get = os.environ.get
    if get("OMP_WAIT_POLICY", "").lower() == "passive" or "0" in (
        get("GOMP_SPINCOUNT"),
        get("KMP_BLOCKTIME"),
    ):
        return
    if "OMP_WAIT_POLICY" in os.environ:
        reason = f"OMP_WAIT_POLICY is {os.environ['OMP_WAIT_POLICY']}"
    else:
        reason = "torch was imported before kernels, and OMP_WAIT_POLICY was not set"
    _logger.warning(
        "torch's threads spin between operations and slow the tvm backend's down, up to tenfold: "
        "%s; set OMP_WAIT_POLICY=PASSIVE in the environment, or import kernels before torch",
        reason,
    )


def _forget() -> None:
    """After a fork: the parent's helpers and locks did not come along."""
    global _crew, _crew_lock
    _crew, _crew_lock = None, threading.Lock()
