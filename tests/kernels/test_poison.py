"""That memory which a kernel must fill really holds NaN before, in both passes.

conftest.py fills what torch makes uninitialised; every other test relies on it.
"""

import pytest
import torch

from tests.kernels.tester import Case, Comparison


def test_new_memory_is_poisoned() -> None:
    like = torch.zeros(3)
    for made in (
        torch.empty(3),
        torch.empty_like(like),
        torch.empty_strided((3,), (2,)),
        like.new_empty(3),
        like.new_empty_strided((3,), (2,)),
    ):
        assert made.isnan().all()
    torch.empty(3, dtype=torch.int64)  # whole numbers have no NaN and stay as they come


@pytest.mark.parametrize("backend", ["chunks", "tvm"])
def test_both_passes_fill_poisoned_memory(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(30, 6, (1, 2), batch=2, dropout=0.3)
    comparison = Comparison.of(case)
    made: list[tuple[int, ...]] = []

    def watched(make: object) -> object:
        def call(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            assert not tensor.is_floating_point() or tensor.isnan().all()
            made.append(tuple(tensor.shape))
            return tensor

        return call

    for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    comparison.check(backend, torch.float32)
    shape = tuple(comparison.inputs[0].shape)
    rows = {"chunks": (2, 30, 2, 1), "tvm": (2, 2, 30)}[backend]
    assert {shape, rows} <= set(made)  # the output and the sums of rows
    if backend == "tvm":
        assert made.count(shape) == 4  # and the gradients of q, k and v
