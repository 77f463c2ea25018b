"""What only the chunks promise: their memory, whatever the window."""

import pytest
import torch

from kernels import chunks, chunks_tiles
from kernels.chunks_heads import Scratch
from tests.kernels.tester import Case, Comparison


def scratch_bytes(window: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the forward and the backward pass over 2,048 positions: all that is not a result."""
    made: list[Scratch] = []

    class Watched(Scratch):
        def __init__(self, like: torch.Tensor) -> None:
            super().__init__(like)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "Scratch", Watched)
        patch.setattr(chunks_tiles, "TILE_BYTES", 2**17)
        case = Case(2048, window, (1, 4), dim=64, dropout=0.2)
        Comparison.of(case).run("chunks", torch.float32)
    return [sum(t.numel() * t.element_size() for t in s._flat.values()) for s in made]


def test_memory_does_not_grow_with_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (scratch_bytes(window, monkeypatch) for window in (64, 256))
    assert len(narrow) == len(wide) == 2  # two passes
    for passes in (0, 1):
        assert wide[passes] <= 1.2 * narrow[passes]
        # the packed streams of one head, and some tiles
        assert wide[passes] <= 8 * 2048 * 64 * 4 + 10 * 2**17
