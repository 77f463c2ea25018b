"""What of the check for machines with a GPU can be tested without one."""

import pytest
import torch

from kernels import device_check
from kernels.call import make_call
from kernels.device_check import CHECKS, TIMINGS, Shape, check_shape, relative_error
from kernels.tvm_backend.cuda_passes import Settings

H100, A100, RTX = 232448, 166912, 101376  # a block's greatest shared memory, in bytes
SMALL = Shape(keys=20, window=6, strides=(1, 2), queries=9, dim=16, dropout=0.2)


def test_without_a_gpu_it_says_so_and_exits_with_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["device_check", "--report", str(tmp_path / "report.json")])
    with pytest.raises(SystemExit, match="no CUDA device: torch .* finds none"):
        device_check.main()
    assert not list(tmp_path.iterdir())


def test_shapes_include_every_term_stride_and_head_size():
    assert {shape.dim for shape in CHECKS} == {32, 64, 128}
    assert {1, 2, 3, 4} <= {stride for shape in CHECKS for stride in shape.strides}
    assert {(s.relative, s.dropout > 0) for s in CHECKS} == {(True, True), (False, False)}
    assert any(shape.queries < shape.keys for shape in CHECKS)


@pytest.mark.parametrize("limit", [H100, A100, RTX])
def test_shapes_are_such_as_the_programs_run(limit):
    for shape in {*CHECKS, *TIMINGS}:
        heads = len(shape.strides)
        settings = Settings(
            batch=shape.batch,
            queries=shape.queries,
            keys=shape.keys,
            heads=heads,
            dim=shape.dim,
            window=min(shape.window, shape.keys - 1),
            strides=shape.strides,
            scale=1.0,
            dropout=shape.dropout,
            seed=0,
            relative=shape.relative,
            shared_limit=limit,
        )
        assert settings.why_not() is None


def test_errors_are_shares_of_the_largest_entry():
    theirs = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.0, -4.4]), theirs) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.01]), torch.tensor([0.0])) == pytest.approx(0.01)


def test_a_right_result_passes_and_a_wrong_one_does_not(monkeypatch):
    """On the CPU, with the oracle in float32 in the place of the kernels."""
    attend = Shape.attend
    monkeypatch.setattr(device_check, "_DEVICE", "cpu")
    monkeypatch.setattr(
        Shape, "attend", lambda self, tensors, backend: attend(self, tensors, "dense")
    )
    result = check_shape(SMALL)
    assert result["passed"]
    assert set(result["errors"]) == {"out", "q", "k", "v", "r", "content_bias", "position_bias"}
    assert check_shape(SMALL, torch.bfloat16)["passed"]

    def wrong(self: Shape, tensors: list[torch.Tensor], backend: str) -> torch.Tensor:
        return attend(self, tensors, "dense") * (1.001 if backend == "tvm" else 1.0)

    monkeypatch.setattr(Shape, "attend", wrong)
    assert not check_shape(SMALL)["passed"]


def test_every_shape_is_a_call():
    for shape in CHECKS:
        q, k = (
            torch.zeros(shape.batch, n, len(shape.strides), shape.dim)
            for n in (shape.queries, shape.keys)
        )
        call = make_call(q, k, k, device_check.Band(shape.window, shape.strides))
        assert call.offset == shape.keys - shape.queries
