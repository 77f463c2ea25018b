"""The arithmetic of the generated CUDA programs, emulated on the CPU, against the dense oracle."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.band import Band, Relative
from kernels.call import Call, make_call
from kernels.tvm_backend.cuda_passes import Settings, run_backward, run_forward
from tests.kernels.cuda import emulation as cuda_emulation

pytest.importorskip("tvm")
if (reason := cuda_emulation.missing_compiler()) is not None:
    pytest.skip(reason, allow_module_level=True)

H100, A100, RTX = 232448, 166912, 101376  # a block's greatest shared memory, in bytes
OUT_ERROR = 5e-6
GRADIENT_ERROR = 5e-6  # of the largest entry
NAMES = ("q", "k", "v", "r", "content bias", "position bias")


@dataclass(frozen=True)
class Case:
    keys: int
    window: int
    strides: tuple[int, ...]
    dim: int = 64
    queries: int | None = None
    batch: int = 1
    relative: bool = True
    dropout: float = 0.3
    shared_limit: int = H100
    scale: float | None = None
    size: float = 1.0  # of the inputs' entries
    seed: int = 2**40 + 12345

    def __str__(self) -> str:
        queries = self.keys if self.queries is None else self.queries
        strides = "".join(map(str, self.strides))
        terms = "-rel" * self.relative + "-drop" * (self.dropout > 0)
        limit = self.shared_limit // 1024
        sizes = f"d{self.dim}-b{self.batch}-{queries}of{self.keys}-w{self.window}-s{strides}"
        return f"{sizes}{terms}-{limit}k"

    def inputs(self) -> list[Tensor]:
        heads, dim = len(self.strides), self.dim
        queries = self.keys if self.queries is None else self.queries
        shapes = [(self.batch, n, heads, dim) for n in (queries, self.keys, self.keys)]
        if self.relative:
            shapes += [(heads, self.window + 1, dim), (heads, dim), (heads, dim)]
        return [self.size * torch.randn(shape) for shape in shapes]

    def call(self, inputs: list[Tensor]) -> Call:
        q, k, v, *relative = inputs
        return make_call(
            q,
            k,
            v,
            Band(self.window, self.strides),
            relative=Relative(*relative) if relative else None,
            dropout=self.dropout,
            seed=self.seed,
            scale=self.scale,
        )


def compute(case: Case, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the emulated programs' output and gradients."""
    call = case.call(inputs)
    settings = Settings.of(call, case.shared_limit)
    assert settings.why_not() is None
    given = [x.contiguous() for x in (call.q, call.k, call.v, *(call.relative or ()))]
    saved = run_forward(settings, given, cuda_emulation.launch)
    return saved[0], run_backward(settings, given, saved, grad, cuda_emulation.launch)


def expect(
    case: Case, inputs: list[Tensor], grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return the oracle's."""
    leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
    out = reference.attend(case.call(leaves))
    out.backward(grad.to(dtype))
    return out.detach(), [x.grad for x in leaves if x.grad is not None]


def check(case: Case) -> None:
    """Hold output and gradients to the errors above."""
    inputs = case.inputs()
    grad = torch.randn(inputs[0].shape)
    out, gradients = compute(case, inputs, grad)
    wanted, wanted_gradients = expect(case, inputs, grad, torch.float64)
    assert error(out, wanted) <= OUT_ERROR
    assert len(gradients) == len(wanted_gradients) == (6 if case.relative else 3)
    for name, mine, theirs in zip(NAMES, gradients, wanted_gradients, strict=False):
        assert error(mine, theirs) <= GRADIENT_ERROR * theirs.abs().max().item(), name


def check_as_float32(case: Case) -> None:
    """Hold output and gradients to the oracle's own error in float32.

    Scores of several hundred cannot be held to 5e-6. Where a softmax is over one key or two, a
    score's gradient is what is left of far larger terms, P * (do . v - do . o): `remains`.
    """
    inputs = case.inputs()
    grad = torch.randn(inputs[0].shape)
    out, gradients = compute(case, inputs, grad)
    wanted, wanted_gradients = expect(case, inputs, grad, torch.float64)
    rough, rough_gradients = expect(case, inputs, grad, torch.float32)
    assert error(out, wanted) <= max(OUT_ERROR, 4 * error(rough, wanted))
    terms = (grad.norm(dim=-1).max() * inputs[2].norm(dim=-1).max()).item() / (1 - case.dropout)
    remains = 1e-6 * terms * case.dim**-0.5 * case.size
    results = zip(NAMES, gradients, wanted_gradients, rough_gradients, strict=False)
    for name, mine, theirs, roughly in results:
        limit = max(GRADIENT_ERROR * theirs.abs().max().item(), 4 * error(roughly, theirs))
        assert error(mine, theirs) <= max(limit, remains), name


def error(mine: Tensor, theirs: Tensor) -> float:
    return (mine - theirs).abs().max().item()


LARGE_TILES = Case(keys=150, window=70, strides=(1, 2, 3, 4), batch=2)
SMALL_TILES = Case(keys=130, window=20, strides=(1, 4), batch=2, queries=45)


@pytest.mark.parametrize(
    "case",
    [
        LARGE_TILES,
        SMALL_TILES,
        Case(keys=141, window=100, strides=(3, 1), dim=32, batch=2, queries=77),
        Case(keys=101, window=40, strides=(1, 2), dim=128, batch=2),
        Case(keys=131, window=65, strides=(1, 2), relative=False, dropout=0.0, queries=67),
    ],
    ids=str,
)
def test_output_and_gradients(case):
    check(case)


# Programs are compiled per head size, tile and terms: these cost no compilation more.
@pytest.mark.parametrize(
    "case",
    [
        replace(LARGE_TILES, keys=64, window=63, strides=(1,)),  # whole tiles only
        replace(LARGE_TILES, keys=65, window=64, strides=(1,)),
        replace(LARGE_TILES, keys=200, window=199, strides=(1,), batch=1, queries=1),
        replace(LARGE_TILES, keys=67, window=66, strides=(7, 60), batch=1),
        replace(LARGE_TILES, keys=41, window=40, strides=(500,), batch=1),  # beyond the sequence
        replace(LARGE_TILES, keys=140, window=50, dropout=0.9),
        replace(LARGE_TILES, keys=140, window=50, scale=0.5, size=3.0),  # scores of several 100
        replace(SMALL_TILES, keys=1, window=0, queries=1),
        replace(SMALL_TILES, keys=66, window=0, queries=66),
        replace(SMALL_TILES, keys=50, window=1, queries=3),
        replace(SMALL_TILES, keys=96, window=32, queries=96, strides=(1,)),
        replace(SMALL_TILES, keys=33, window=31, queries=33, strides=(2, 3, 5, 1, 1)),
    ],
    ids=str,
)
def test_edges(case):
    check_as_float32(case)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [H100, A100, RTX, 65536])
def test_random_shapes_on_devices_of_any_shared_memory(limit):
    choose = random.Random(limit)
    for _ in range(12):
        keys = choose.randint(1, 220)
        check_as_float32(
            Case(
                keys=keys,
                window=min(keys - 1, choose.choice([0, 1, 31, 32, 33, 64, 100, 200])),
                strides=tuple(choose.choice([1, 1, 2, 3, 4, 9]) for _ in range(3)),
                dim=choose.choice([16, 32, 48, 64] if limit < A100 else [64, 80, 96, 112, 128]),
                queries=choose.randint(1, keys),
                batch=choose.choice([1, 2]),
                relative=choose.random() < 0.7,
                dropout=choose.choice([0.0, 0.3]),
                shared_limit=limit,
            )
        )


def test_mask_and_result_do_not_depend_on_the_tiles():
    inputs = LARGE_TILES.inputs()
    grad = torch.randn(inputs[0].shape)
    small = replace(LARGE_TILES, shared_limit=80_000)
    assert Settings.of(small.call(inputs), 80_000).program("forward").tile.columns == 2
    results = (_flat(compute(case, inputs, grad)) for case in (LARGE_TILES, small))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-5 * float(first.abs().max()))


def _flat(result: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
    return [result[0], *result[1]]
