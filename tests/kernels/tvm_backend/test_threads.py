"""The crew of threads: every job once, errors, turns, forks, several callers."""

import functools
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.tvm_backend import threads as workers
from kernels.tvm_backend.threads import Turns, spread
from tests.kernels.tester import ended_well


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_job_once(threads: int) -> None:
    done: list[int] = []
    workers: list[int] = []

    def prepare():
        workers.append(threading.get_ident())
        return lambda job: (time.sleep(0.001), done.append(job))

    spread(40, prepare)
    assert sorted(done) == list(range(40))
    assert len(workers) == len(set(workers)) <= threads
    spread(0, lambda: pytest.fail("there is nothing to prepare for"))


def test_turns_are_in_order_in_every_lane(threads: int) -> None:
    turns = Turns()
    order: list[tuple[int, int]] = []

    def do(job: int) -> None:
        lane, turn = job % 3, job // 3
        time.sleep(0.002 if job % 2 else 0)
        turns.take(lane, turn, lambda: order.append((lane, turn)))

    spread(30, lambda: do)
    for lane in range(3):
        assert [turn for other, turn in order if other == lane] == list(range(10))


def test_an_error_reaches_the_caller_and_wakes_those_that_wait(threads: int) -> None:
    turns = Turns()

    def do(job: int) -> None:
        try:
            if job == 1:
                time.sleep(0.01)
                raise ValueError("job 1 is broken")
            turns.take(0, job, lambda: None)
        except BaseException:
            turns.break_off()
            raise

    with pytest.raises(ValueError, match="job 1 is broken"):
        spread(12, lambda: do)


def test_several_callers_at_once(threads: int) -> None:
    totals = [0] * 8

    def call(caller: int) -> None:
        done: list[int] = []
        spread(25, lambda: done.append)
        totals[caller] = sum(done)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert totals == [300] * 8


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own_helpers(threads: int) -> None:
    spread(10, lambda: lambda job: None)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        spread(20, lambda: done.append)
        os._exit(0 if sorted(done) == list(range(20)) else 1)
    assert ended_well(child, 30)


def test_a_failed_preparation_wakes_the_jobs_that_wait_for_its_turn(threads: int):
    turns = Turns()
    calls = itertools.count()

    def prepare():
        if next(calls) == 0:
            raise MemoryError("no room for the first worker")
        return lambda number: turns.take(0, number, lambda: None)

    with pytest.raises(MemoryError, match="no room"):
        spread(4, prepare, failed=turns.break_off)


def test_workers_hold_nothing_when_the_call_is_over(threads: int) -> None:
    freed: list[int] = []

    class Held:
        def __del__(self) -> None:
            time.sleep(0.0002)
            freed.append(1)

    def prepare():
        held.append(1)
        return functools.partial(lambda token, job: time.sleep(0.0001), Held())

    for _ in range(40):
        held: list[int] = []
        freed.clear()
        spread(2 * threads, prepare)
        assert len(freed) == len(held)


def test_an_interrupted_wait_goes_on_until_the_others_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 2)
    stopped = threading.Event()
    begun = threading.Event()
    caller = threading.get_ident()

    def do(job: int) -> None:
        if threading.get_ident() != caller:
            begun.set()
            time.sleep(0.05)
            stopped.set()
        else:
            begun.wait(10)

    wait_for = threading.Condition.wait_for

    def interrupted(self: threading.Condition, predicate, timeout=None):
        monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Condition, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spread(2, lambda: do)
    assert stopped.is_set()


def test_little_work_stays_on_the_callers_thread(threads: int) -> None:
    done: list[int] = []
    workers: set[int] = set()

    def do(job: int) -> None:
        time.sleep(0.001)
        workers.add(threading.get_ident())
        done.append(job)

    spread(5, lambda: do, work=1e4)
    assert workers == {threading.get_ident()}
    assert done == list(range(5))
    failures: list[str] = []
    with pytest.raises(KeyError):
        spread(5, lambda: {}.__getitem__, lambda: failures.append("told"), work=1e4)
    assert failures == ["told"]


def test_torch_is_imported_after_its_threads_are_told_to_sleep(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; raise SystemExit(os.environ['OMP_WAIT_POLICY'])")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
        done = subprocess.run(
            [sys.executable, "-c", "import kernels"],
            env={**environment, **given, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr.strip() == expected


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"OMP_WAIT_POLICY": "passive"}, None),
        ({"GOMP_SPINCOUNT": "0"}, None),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY is ACTIVE"),
        ({}, "torch was imported before kernels"),
    ],
    ids=str,
)
def test_threads_that_spin_are_named_once(
    policy: dict[str, str],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in policy.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 2)
    workers._warn_of_spinning.cache_clear()
    with caplog.at_level(logging.WARNING, "longchar.kernels"):
        for _ in range(2):
            workers._forget()
            spread(2, lambda: lambda job: None)
    assert len(caplog.messages) == (said is not None)
    assert said is None or said in caplog.messages[0]
