"""The crew of threads: every job once, errors, turns, forks, several callers."""

import itertools
import os
import threading
import time

import pytest
import torch

from kernels.workers import Turns, spread
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
