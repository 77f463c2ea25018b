"""Which positions a query sees, and the tensors of the relative positions."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """A causal, strided band: position i sees j = i - delta * stride, 0 <= delta <= window, j >= 0.

    `window` counts the positions besides the position itself, so a row has window + 1 keys.
    `strides` holds one stride per head (the paper's dilation + 1; Longformer, section 4.1).
    """

    window: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for a negative window, or missing strides or a stride below 1."""
        if not isinstance(self.window, int) or self.window < 0:
            raise ValueError(f"band.window is {self.window!r}; it must be an integer >= 0")
        if not isinstance(self.strides, tuple) or not self.strides:
            raise ValueError(
                f"band.strides is {self.strides!r}; it must be a tuple with one stride per head"
            )
        for head, stride in enumerate(self.strides):
            if not isinstance(stride, int) or stride < 1:
                raise ValueError(
                    f"band.strides[{head}] is {stride!r}; a stride must be an integer >= 1"
                )

    @property
    def reach(self) -> int:
        """The distance, in positions, to the farthest key that any head sees."""
        return self.window * max(self.strides)


class Relative(NamedTuple):
    """The relative terms of Transformer-XL's attention.

    A row `r[h, delta]` is head h's projection of the sinusoid at the true distance
    delta * stride_h. Transformer-XL calls the two biases u and v.
    """

    r: Float[Tensor, "heads rows dim"]
    content_bias: Float[Tensor, "heads dim"]
    position_bias: Float[Tensor, "heads dim"]
