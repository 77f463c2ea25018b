"""The TVM backend beyond agreement on small shapes: cuts into tasks, bits, threads, targets."""

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import Band, Relative, banded_attention
from kernels.build import library
from kernels.call import make_call
from kernels.cpu.targets import AVX2, SSE, Target, machine_target
from kernels.cpu.tasks import backward_tasks, forward_tasks
from kernels.tvm_backend import cpu as function
from tests.kernels.tester import Case, Comparison, ended_well, types_of

CASES = [
    Case(1500, 1100, (1, 2), dim=64, dropout=0.2),  # two runs of keys, tasks of many shapes
    Case(1300, 40, (1, 3), dim=64, dropout=0.2, batch=2),
    Case(1200, 700, (1,), queries=53, dim=64, dropout=0.2),
    Case(700, 5000, (1,), dim=64, dropout=0.2),  # beyond the sequence
    Case(65, 3, (70, 1), dim=64, dropout=0.2),  # a stride beyond the sequence
]


@pytest.fixture(autouse=True)
def needs_tvm() -> None:
    types_of("tvm")


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_long_sequences(case: Case) -> None:
    Comparison.of(case).check_in_every_type("tvm")


def results(comparison: Comparison) -> list[Tensor]:
    return comparison.run("tvm", torch.float32)


@pytest.mark.usefixtures("restore_threads")
def test_same_bits_every_time_and_on_any_number_of_threads() -> None:
    comparison = Comparison.of(Case(1100, 200, (1, 2), dim=64, dropout=0.2, batch=2))
    torch.set_num_threads(1)
    expected = results(comparison)
    for threads in (1, 2, 2, 2, 3, 7):
        torch.set_num_threads(threads)
        for one, other in zip(results(comparison), expected, strict=True):
            assert torch.equal(one, other)


def test_eight_python_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads share torch's generator: one may draw between another's seeding and its draw.
    monkeypatch.setattr("kernels._draw_seed", lambda: 12345)
    comparison = Comparison.of(Case(400, 90, (1, 2), dim=64, dropout=0.2))
    expected, found = results(comparison), {}
    torch.manual_seed(0)

    def run(number: int) -> None:
        found[number] = results(comparison)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    for outcome in found.values():
        assert all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_after_a_fork() -> None:
    case = Case(200, 60, (1, 2), dim=64)
    q, k, v, *relative = (x.float() for x in case.tensors())
    call = make_call(q, k, v, case.band, relative=Relative(*relative), dropout=0.2, seed=7)
    expected = function.attend(call)
    child = os.fork()
    if child == 0:
        # Small tensors, compared by numpy: torch's own OpenMP threads do not survive a fork.
        same = np.array_equal(function.attend(call).numpy(), expected.numpy())
        os._exit(0 if same else 1)
    assert ended_well(child, 60)


def test_gradients_only_where_they_are_wanted() -> None:
    q, k, v = (torch.randn(1, 30, 2, 64) for _ in range(3))
    r = torch.randn(2, 6, 64, requires_grad=True)
    bias = torch.zeros(2, 64)
    relative = Relative(r, bias, bias)
    out = banded_attention(q, k, v, Band(5, (1, 1)), relative=relative, dropout=0.2, backend="tvm")
    out.sum().backward()
    assert r.grad is not None
    assert q.grad is None


@pytest.mark.parametrize("target", [AVX2, SSE], ids=lambda target: target.name)
def test_other_instruction_sets_agree(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine_target() is SSE and target is AVX2:
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(library, "machine_target", lambda: target)
    monkeypatch.setattr(function, "variant_for", library.variant_for.__wrapped__)
    case = Case(300, 70, (1, 2), queries=250, dim=16, dropout=0.2)
    Comparison.of(case).check_in_every_type("tvm")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float32; the tensors are torch.float64"),
        ({"dim": 24}, "multiple of 16; it is 24"),
        ({"device": "meta"}, "the tensors are on meta"),
    ],
    ids=str,
)
def test_reasons(change: dict, reason: str) -> None:
    dim = change.pop("dim", 32)
    q = torch.zeros(1, 4, 1, dim, **change)
    assert reason in str(function.can_run(make_call(q, q, q, Band(2, (1,)))))


def test_the_limit_of_sizes_is_named() -> None:
    q = torch.zeros(1).expand(1, 1, 1, 64)
    k = torch.zeros(1).expand(1, 2**25, 1, 64)
    assert "k has 2147483648 elements" in str(function.can_run(make_call(q, k, k, Band(2, (1,)))))


def test_tasks_cover_everything_once_whatever_the_threads() -> None:
    tasks = forward_tasks(2, 700, 900, (1, 3), 50, 64, 48)
    seen = set()
    for b, head, residue, stride, begin, end in tasks.table.view(-1, 6).tolist():
        seen |= {(b, head, residue + stride * t) for t in range(begin, end)}
    assert seen == {(b, h, i) for b in range(2) for h in range(2) for i in range(200, 900)}
    tasks = backward_tasks(2, 900, (1, 3), 50, 64, 16)
    rows = tasks.table.view(-1, 6).tolist()
    keys = [(b, h, rho + c * t) for b, h, rho, c, s, e in rows for t in range(s, e)]
    assert len(keys) == len(set(keys)) == 2 * 2 * 900
    covered = sorted(i for run in tasks.runs for i in range(run.begin, run.end))
    assert covered == list(range(tasks.count))
    for run in tasks.runs:
        assert {rows[i][1] for i in range(run.begin, run.end)} == {run.head}
