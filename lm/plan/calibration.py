"""How long the parts of a training step take on this device, measured in seconds of work.

Each part is run by itself, forward and backward, through the code that training uses: a block
whose attention sees one position, banded attention for each window, what lies around the blocks,
the update, and getting fresh memory. `Calibration.step_time` puts a step together from them; no
whole step is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import Band, Relative, banded_attention
from lm.config.schema import OptimConfig
from lm.costs.flops import block_flops, distance_flops, pair_flops, visible_pairs
from lm.costs.gpu_rates import Cut, StepTime
from lm.costs.memory import FLOAT, Memory
from lm.machine.device import DTYPES, Device
from lm.model.dropout import dropout
from lm.model.language_model import SYMBOLS, LanguageModel, ModelConfig
from lm.schedule import Stage
from lm.training.optimizer import build_optimizer

POSITIONS = 8192  # of a block, at most
LENGTH, WINDOW = 2048, 1024  # of attention; a pair of a wider window costs the same
FRESH = 2**28  # bytes
TRIES = 6


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward and of a backward pass."""

    forward: float
    backward: float

    def step(self, checkpointing: bool) -> float:
        """Of both; with checkpointing the forward pass is done twice."""
        return self.forward * (2 if checkpointing else 1) + self.backward


class Calibration:
    """The parts of a model's step on this device, each measured when it is first asked for.

    Args:
        model: what is trained. device: with the precision of the training.
    """

    watts = float("nan")

    def __init__(self, model: ModelConfig, device: Device) -> None:
        self.model = model
        self.device = device
        self.name = device.name
        self.dtype = DTYPES[device.precision]
        self.measured: dict[str, dict[int, Passes]] = {"block": {}, "around": {}, "pair": {}}

    def step_time(self, model: ModelConfig, stage: Stage, cut: Cut, memory: Memory) -> StepTime:
        """Estimate one optimiser step; transfers between devices are not in it."""
        n = cut.sequences * stage.sequence
        part = min(n, POSITIONS)
        dense = model.layers * self.block(part).step(cut.checkpointing)
        dense = (dense + self.around(part).step(False)) * n / part
        passes = 4 if cut.checkpointing else 3
        dense += passes * distance_flops(model, stage) * self.seconds_per_flop
        attention = 0.0
        for window, strides in zip(stage.windows, stage.strides, strict=True):
            pairs = sum(visible_pairs(stage.sequence, window, s) for s in strides)
            seconds = self.pair(min(window, WINDOW)).step(cut.checkpointing)
            attention += seconds * pairs * cut.sequences
        kept = memory.activations + memory.attention + memory.logits
        return StepTime(
            dense=cut.pieces * dense,
            attention=cut.pieces * attention,
            memory=cut.pieces * kept * self.seconds_per_fresh_byte,
            update=memory.gradients / FLOAT * self.seconds_per_parameter,
        )

    def block(self, positions: int) -> Passes:
        """Of a block, all that is done per position."""
        return self._once("block", positions, self._block)

    def around(self, positions: int) -> Passes:
        """Of the embedding, the head and the loss."""
        return self._once("around", positions, self._around)

    def pair(self, window: int) -> Passes:
        """Of one visible pair of one head, beyond what attention costs a block anyway."""
        return self._once("pair", window, self._pair)

    def _once(self, part: str, size: int, measure: Callable[[int], Passes]) -> Passes:
        known = self.measured[part]
        if size not in known:
            known[size] = measure(size)
        return known[size]

    def lines(self) -> list[str]:
        """What was measured so far, in words."""
        rates: dict[str, list[str]] = {"block": [], "pair": []}
        flops = {"block": block_flops(self.model), "pair": pair_flops(self.model)}
        for part, said in rates.items():
            for size, passes in sorted(self.measured[part].items()):
                work = 3 * flops[part] * (size if part == "block" else 1)
                if seconds := passes.step(False):
                    said.append(f"{work / seconds / 1e9:,.0f} ({size:,})")
        return [
            f"measured, GFLOP/s: torch.mm {self.device.peak / 1e9:,.0f} ({self.device.precision})",
            f"  a block, by positions: {', '.join(rates['block'])}",
            f"  attention, by window: {', '.join(rates['pair'])}",
            f"  update {self.seconds_per_parameter * 1e9:.2f} ns a parameter, fresh memory "
            f"{self.seconds_per_fresh_byte * 1e9:.2f} ns a byte",
        ]

    @cached_property
    def seconds_per_flop(self) -> float:
        """Of float32 matrix products."""
        a = torch.ones(1024, self.model.width, device=self.device.kind)
        b = torch.ones(self.model.width, self.model.width, device=self.device.kind)
        seconds = self._timed(lambda: torch.mm(a, b))
        return seconds / (2 * 1024 * self.model.width**2)

    @cached_property
    def seconds_per_parameter(self) -> float:
        """Of clipping and the optimiser's update."""
        size = 2048
        model = nn.Linear(size, size, device=self.device.kind)
        stage = Stage(1, 1, (0,), ((1,),), 1e-9, 1, 1, 0)
        optimizer = build_optimizer(model, OptimConfig(), stage)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

        def update() -> None:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            nn.utils.clip_grads_with_norm_(parameters, 0.25, norm)
            optimizer.step()

        return self._timed(update) / (size * size + size)

    @cached_property
    def seconds_per_fresh_byte(self) -> float:
        """What the first use of memory costs beyond writing it; GPUs keep theirs."""
        if self.device.kind != "cpu":
            return 0.0
        used = torch.empty(FRESH, dtype=torch.uint8)
        again = self._timed(lambda: used.fill_(1))
        first = self._timed(lambda: torch.empty(FRESH, dtype=torch.uint8).fill_(1))
        return max(first - again, 0.0) / FRESH

    @cached_property
    def _model(self) -> LanguageModel:
        torch.manual_seed(0)
        one = ModelConfig(**vars(self.model) | {"layers": 1})
        return LanguageModel(one, [Band(0, (1,) * one.heads)]).to(self.device.kind)

    def _block(self, positions: int) -> Passes:
        model, block = self._model, self._model.blocks[0]
        x = torch.randn(1, positions, self.model.width, device=self.device.kind)
        x.requires_grad_()
        return self._passes(lambda: block(x, model.table, *model.position_biases(0)))

    def _around(self, positions: int) -> Passes:
        tokens = torch.randint(SYMBOLS, (1, positions), device=self.device.kind)

        def forward() -> Tensor:
            x = dropout(self._model.embed(tokens), self.model.dropout, True)
            return F.cross_entropy(self._model.predict(x)[0], tokens[0])

        return self._passes(forward)

    def _pair(self, window: int) -> Passes:
        if window == 0:
            return Passes(0.0, 0.0)
        wide, none = self._attention(window), self.bare_attention
        pairs = self.model.heads * (visible_pairs(LENGTH, window, 1) - LENGTH)
        forward, backward = wide.forward - none.forward, wide.backward - none.backward
        return Passes(max(forward, 0.0) / pairs, max(backward, 0.0) / pairs)

    @cached_property
    def bare_attention(self) -> Passes:
        """Of attention in which each position sees only itself."""
        return self._attention(0)

    def _attention(self, window: int) -> Passes:
        model, kind = self.model, self.device.kind
        heads, width = model.heads, model.width // model.heads
        shape = (1, LENGTH, heads, width)
        q, k, v = (torch.randn(shape, device=kind, dtype=self.dtype) for _ in range(3))
        r = torch.randn(heads, window + 1, width, device=kind)
        u, p = (torch.randn(heads, width, device=kind) for _ in range(2))
        for tensor in (q, k, v, r, u, p):
            tensor.requires_grad_()
        band, relative = Band(window, (1,) * heads), Relative(r, u, p)

        def forward() -> Tensor:
            return banded_attention(
                q,
                k,
                v,
                band,
                relative=relative,
                dropout=model.attention_dropout,
                backend=model.backend,
            )

        return self._passes(forward)

    def _passes(self, forward: Callable[[], Tensor]) -> Passes:
        times = []
        for _ in range(TRIES + 1):
            self._model.zero_grad()
            start = self._now()
            with torch.autocast(self.device.kind, self.dtype, enabled=self.dtype.itemsize < FLOAT):
                out = forward()
            middle = self._now()
            gradient = torch.ones_like(out)
            begin = self._now()
            out.backward(gradient)
            times.append((middle - start, self._now() - begin))
        return Passes(*(_typical(each) for each in zip(*times, strict=True)))

    def _timed(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(TRIES + 1):
            start = self._now()
            work()
            times.append(self._now() - start)
        return _typical(times)

    def _now(self) -> float:
        if self.device.kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _typical(times: list[float] | tuple[float, ...]) -> float:
    """The median of the faster half, the first one, which warms up, left out."""
    return statistics.median(sorted(times[1:])[: TRIES // 2])
