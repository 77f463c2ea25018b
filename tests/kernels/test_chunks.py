"""What only the chunks promise: their memory, whatever the window, and streams in a line."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


class Filled(Scratch):
    """Buffers that are full of NaN to begin with."""

    def flat(self, name: str, elements: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        new = name not in self._flat or self._flat[name].numel() < elements
        buffer = super().flat(name, elements, dtype)
        return buffer.fill_(torch.nan) if new and buffer.is_floating_point() else buffer


def check_in_line(case: Case, dtype: torch.dtype) -> None:
    """Compare with the oracle, and see that the longest streams do lie in a line."""
    length = -(-case.keys // case.strides[0])
    assert chunks_tiles.line_pitch(length, length, case.window) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "Scratch", Filled)
        Comparison.of(case).check("chunks", dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        Case(2048, 32, (4,), dropout=0.3),  # whole blocks
        Case(1600, 20, (3,), batch=2),  # two lengths of stream, with room after each
        Case(2100, 64, (2, 1), relative=False, dropout=0.3),  # blocks of 64
    ],
    ids=str,
)
def test_long_streams_in_a_line(case: Case, dtype: torch.dtype) -> None:
    check_in_line(case, dtype)


@st.composite
def short_lines(draw: st.DrawFn) -> Case:
    stride = draw(st.integers(2, 4))
    return Case(
        keys=stride * draw(st.integers(70, 120)) + draw(st.integers(0, 3)),
        window=draw(st.integers(0, 70)),
        strides=(stride, *draw(st.lists(st.integers(1, 4), max_size=1))),
        batch=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([1, 3, 8])),
        relative=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.4])),
    )


@given(case=short_lines(), tile_bytes=st.sampled_from([2**12, 2**16, 2**20]))
@settings(max_examples=25)
def test_short_streams_in_a_line(case: Case, tile_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks_tiles, "LINE_LENGTH", 1)
        patch.setattr(chunks_tiles, "TILE_BYTES", tile_bytes)
        check_in_line(case, torch.float64)


def test_short_streams_are_not_given_room() -> None:
    assert chunks_tiles.line_pitch(511, 511, 0) is None
    assert chunks_tiles.line_pitch(512, 512, 32) == 512
    assert chunks_tiles.line_pitch(513, 513, 33) is None  # sixteen windows are longer
    assert chunks_tiles.line_pitch(1023, 1023, 47) == 1024
    assert chunks_tiles.line_pitch(2048, 2049, 32) is None
