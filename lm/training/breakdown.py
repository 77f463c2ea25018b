"""Where the time of a training step goes: what torch's profiler recorded, by kind of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.autograd.profiler_util import FunctionEvent

ATTENTION = "banded attention"
# Kinds of work and the operators that begin with these names; the first that fits is taken.
KINDS = {
    ATTENTION: ("_Attention", "_Chunks", "_Loop", "kernels::"),
    "optimiser": ("aten::_fused_adam", "aten::_foreach_add", "aten::_foreach_addc"),
    "gradient clipping": ("aten::_foreach_norm", "aten::_foreach_mul", "aten::linalg_vector_norm"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm"),
    "dropout": ("_Dropout", "aten::dropout", "aten::native_dropout", "NativeDropout"),
    "gelu": ("aten::gelu",),
    "layer norm": ("aten::native_layer_norm", "aten::layer_norm"),
    "loss": ("aten::_log_softmax", "aten::nll_loss", "aten::log_softmax", "aten::cross_entropy"),
    "embedding": ("aten::embedding",),
    "casts and copies": ("aten::copy_", "aten::_to_copy", "aten::contiguous", "aten::clone"),
    "sums and products": ("aten::add", "aten::mul", "aten::sum", "aten::div"),
    "processes": ("c10d::", "gloo::", "nccl::"),
}
OTHER = "everything else"


@dataclass(frozen=True)
class Breakdown:
    """Seconds per step by kind of work, and what the clock says of the whole recorded step."""

    seconds: float
    kinds: dict[str, float] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """Parts of the step's time, from 0 to 1."""
        return {kind: seconds / self.seconds for kind, seconds in self.kinds.items()}

    def table(self) -> str:
        """Readable lines, the largest first; time in no operator is Python's and waiting."""
        rows = sorted(self.kinds.items(), key=lambda item: -item[1])
        rows.append(("outside of operators", self.seconds - sum(self.kinds.values())))
        lines = [f"{'kind of work':<22}{'s/step':>10}{'share':>8}"]
        lines += [f"{kind:<22}{s:>10.4f}{s / self.seconds:>8.1%}" for kind, s in rows]
        return "\n".join([*lines, f"{'one recorded step':<22}{self.seconds:>10.4f}{1:>8.1%}"])


def break_down(
    events: Iterable[FunctionEvent], seconds: float, steps: int, *, on_gpu: bool = False
) -> Breakdown:
    """Add up the time of `steps` recorded steps by kind of work.

    An operator's own time goes to the outermost operator above it that has a kind, so that what
    banded attention calls counts as attention.
    """
    kinds: dict[str, float] = defaultdict(float)
    for event in events:
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if own > 0:
            kinds[_kind_of(event)] += own / 1e6 / steps
    return Breakdown(seconds, dict(kinds))


def _kind_of(event: FunctionEvent) -> str:
    found = OTHER
    above: FunctionEvent | None = event
    while above is not None:
        name = above.name.removeprefix("autograd::engine::evaluate_function: ")
        for kind, prefixes in KINDS.items():
            if name.startswith(prefixes):
                found = kind
                break
        above = above.cpu_parent
    return found
