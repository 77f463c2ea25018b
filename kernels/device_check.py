"""Checks and times the CUDA kernels on a machine with a GPU: python -m kernels.device_check.

Output and gradients are compared with the dense oracle in float64, over many shapes, on another
stream and from half-precision inputs; then forward and backward are timed beside compiled
flex_attention, scaled_dot_product_attention and the chunks backend. A JSON report is written.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels import Band, Relative, banded_attention
from kernels.call import make_call
from kernels.reference import attend as attend_densely

_DEVICE = "cuda"
_SECONDS = 280.0  # no timing starts later
_ERROR = 1e-5  # of the largest entry, for output and gradients of float32 inputs
_NAMES = ("out", "q", "k", "v", "r", "content_bias", "position_bias")


@dataclass(frozen=True)
class Shape:
    """One problem; `queries` are the last of `keys` positions."""

    keys: int
    window: int
    strides: tuple[int, ...]
    queries: int
    dim: int = 64
    batch: int = 1
    relative: bool = True
    dropout: float = 0.0

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return random inputs on the device: q, k, v and, with relative terms, r, u, p."""
        heads = len(self.strides)
        sizes: list[tuple[int, ...]] = [
            (self.batch, n, heads, self.dim) for n in (self.queries, self.keys, self.keys)
        ]
        if self.relative:
            sizes += [(heads, self.window + 1, self.dim), (heads, self.dim), (heads, self.dim)]
        return [torch.randn(size, device=_DEVICE).to(dtype).requires_grad_() for size in sizes]

    def attend(self, tensors: list[Tensor], backend: str) -> Tensor:
        """Return the public function's output; the mask's seed is the same every time."""
        q, k, v, *relative = tensors
        torch.manual_seed(7)
        return banded_attention(
            q,
            k,
            v,
            Band(self.window, self.strides),
            relative=Relative(*relative) if relative else None,
            dropout=self.dropout,
            backend=backend,
        )


CHECKS = tuple(
    Shape(keys, window, strides, queries, dim, batch, relative, dropout)
    for dim in (32, 64, 128)
    for keys, window, strides, queries, batch in (
        (300, 100, (1, 2, 3, 4), 300, 2),
        (257, 32, (1, 4), 257, 1),
        (200, 199, (1, 1), 70, 2),
        (65, 0, (1, 3), 65, 1),
        (130, 64, (7, 200), 1, 2),
    )
    for relative, dropout in ((True, 0.2), (False, 0.0))
)
TIMINGS = tuple(
    Shape(n, window, (1,) * 8, n, relative=relative)
    for n, window in ((2048, 32), (2048, 512), (8192, 512), (23040, 512), (23040, 2048))
    for relative in (True, False)
)


def relative_error(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a share of the largest entry, or of 1 if that is less."""
    difference = (mine.double() - theirs.double()).abs().max().item()
    return difference / max(theirs.abs().max().item(), 1.0)


def run_pass(shape: Shape, tensors: list[Tensor], grad: Tensor, backend: str) -> list[Tensor]:
    """Return the output and the gradients of the inputs."""
    out = shape.attend(tensors, backend)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


def check_shape(shape: Shape, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Compare the tvm backend with the oracle in float64; equal bits are wanted when repeated."""
    tensors = shape.tensors(dtype)
    grad = torch.randn_like(tensors[0])
    mine, again = (run_pass(shape, tensors, grad, "tvm") for _ in range(2))
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    theirs = run_pass(shape, exact, grad, "dense")
    limit = max(_ERROR, 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 0.0)
    errors = {name: relative_error(a, b) for name, a, b in zip(_NAMES, mine, theirs, strict=False)}
    same = all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))
    passed = same and all(error <= limit for error in errors.values())
    return {"shape": asdict(shape), "dtype": str(dtype), "errors": errors, "passed": passed}


def check_stream(repeats: int = 50) -> dict[str, Any]:
    """Compute on a stream of its own, right after slow work that makes the inputs."""
    shape = Shape(512, 100, (1, 2), 512)
    tensors = [tensor.detach() for tensor in shape.tensors()]
    wanted = shape.attend(tensors, "tvm")
    slow = torch.randn(2048, 2048, device="cuda")
    stream, wrong = torch.cuda.Stream(), 0
    for _ in range(repeats):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fresh = [torch.empty_like(tensor) for tensor in tensors]
            torch.mm(slow, slow)
            for target, source in zip(fresh, tensors, strict=True):
                target.copy_(source)
            out = shape.attend(fresh, "tvm")
        stream.synchronize()
        wrong += not torch.equal(out, wanted)
    return {"check": "other stream", "wrong": wrong, "repeats": repeats, "passed": wrong == 0}


def check_long(keys: int = 32256, window: int = 8192, rows: int = 64) -> dict[str, Any]:
    """Compare the last rows of long sequences, two at once, with the oracle on what they see."""
    shape = Shape(keys, window, (1, 1), keys, batch=2, relative=True)
    with torch.no_grad():
        tensors = shape.tensors()
        out = shape.attend(tensors, "tvm")[:, -rows:]
        q, k, v, *relative = (tensor.detach().double() for tensor in tensors)
        seen = slice(-(window + rows), None)
        call = make_call(
            q[:, -rows:],
            k[:, seen],
            v[:, seen],
            Band(window, shape.strides),
            relative=Relative(*relative),
        )
        error = relative_error(out, attend_densely(call))
    return {"check": "last rows of a long sequence", "error": error, "passed": error <= _ERROR}


def passes(shape: Shape) -> dict[str, Callable[[list[Tensor]], Tensor]]:
    """Return what is timed for a shape, by name; the peers have no relative terms."""
    found: dict[str, Callable[[list[Tensor]], Tensor]] = {
        name: lambda tensors, name=name: shape.attend(tensors, name)  # type: ignore[misc]
        for name in ("tvm", "chunks")
    }
    if shape.relative:
        return found
    length, window = shape.keys, shape.window

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & (row - column <= window)

    def flex(tensors: list[Tensor]) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        return compiled(q, k, v, block_mask=blocks)

    def dense(tensors: list[Tensor]) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(flex_attention)
    blocks = create_block_mask(visible, None, None, length, length, device="cuda")
    return found | {"flex_attention": flex, "sdpa, causal without a window": dense}


def time_shape(shape: Shape, deadline: float) -> list[dict[str, Any]]:
    """Return milliseconds and peak memory of forward and of both passes, for tvm and its peers."""
    rows = []
    for name, attend in passes(shape).items():
        if time.monotonic() > deadline:
            break
        tensors = shape.tensors()
        grad = torch.randn_like(tensors[0])

        def both(
            attend: Callable[[list[Tensor]], Tensor] = attend,
            tensors: list[Tensor] = tensors,
            grad: Tensor = grad,
        ) -> None:
            out = attend(tensors)
            torch.autograd.grad(out, tensors, grad.view(out.shape))

        forward = [tensor.detach() for tensor in tensors]
        rows.append(
            {
                "shape": asdict(shape),
                "what": name,
                "forward": measure(lambda a=attend, t=forward: a(t)),  # type: ignore[misc]
                "both": measure(both),
            }
        )
    return rows


def measure(work: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Return the median of some runs in ms, and the peak of memory beyond what was there, in MB."""
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    peak = torch.cuda.max_memory_allocated() - before
    return {"ms": sorted(times)[repeats // 2], "peak_mb": peak / 2**20}


def run_checks() -> list[dict[str, Any]]:
    """Run all comparisons."""
    results = [check_shape(shape) for shape in CHECKS]
    results += [check_shape(CHECKS[10], dtype) for dtype in (torch.float16, torch.bfloat16)]
    return [*results, check_stream(), check_long()]


def main() -> None:
    """Check, time, write the report; exit with 1 if a check fails or there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.device_check", description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("device_check.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"no CUDA device: torch {torch.__version__} finds none on this machine")
    deadline = time.monotonic() + _SECONDS
    checks = run_checks()
    failed = [check for check in checks if not check["passed"]]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed")  # noqa: T201
    timings: list[dict[str, Any]] = []
    for shape in TIMINGS:
        if time.monotonic() < deadline:
            timings += time_shape(shape, deadline)
    for row in timings:
        print(_line(row))  # noqa: T201
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    text = json.dumps({**report, "checks": checks, "timings": timings}, indent=1)
    options.report.write_text(text + "\n")
    print(f"report: {options.report}")  # noqa: T201
    if failed:
        sys.exit(f"failed: {json.dumps(failed[0])}")


def _line(row: dict[str, Any]) -> str:
    shape, forward, both = row["shape"], row["forward"], row["both"]
    terms = "rel" if shape["relative"] else "   "
    return (
        f"n {shape['keys']:6} w {shape['window']:5} {terms} {row['what']:30} "
        f"forward {forward['ms']:8.2f} ms {forward['peak_mb']:7.0f} MB, "
        f"both {both['ms']:8.2f} ms {both['peak_mb']:7.0f} MB"
    )


if __name__ == "__main__":
    main()
