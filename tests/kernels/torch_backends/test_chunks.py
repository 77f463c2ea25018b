"""What only the chunks promise: their memory, whatever the window, and streams in a line."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Band, banded_attention
from kernels.torch_backends import chunks
from kernels.torch_backends import heads as chunks_heads
from kernels.torch_backends import tiles as chunks_tiles
from kernels.torch_backends.heads import Scratch
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


class Dirty(Scratch):
    """Buffers that never hold what an earlier head or tile left there."""

    def flat(self, name: str, elements: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        buffer = super().flat(name, elements, dtype)
        return buffer.fill_(torch.nan if buffer.is_floating_point() else -7)


def check_in_line(case: Case, dtype: torch.dtype) -> None:
    """Compare with the oracle, and see that both passes put streams in a line."""
    pitches: list[int | None] = []

    def tiles_of(*arguments: Any) -> Iterator[chunks_tiles.Tile]:
        tiles = list(chunks_tiles.tiles_of(*arguments))
        pitches.extend(tile.pitch for tile in tiles)
        return iter(tiles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "Scratch", Dirty)
        patch.setattr(chunks_heads, "tiles_of", tiles_of)
        Comparison.of(case).check("chunks", dtype)
    assert any(pitches[: len(pitches) // 2])
    assert any(pitches[len(pitches) // 2 :])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        Case(2048, 32, (4,), dropout=0.3),  # whole blocks
        Case(2150, 20, (4,), batch=2),  # streams of 538 and of 537, with room after each
        Case(2100, 64, (2, 1), relative=False, dropout=0.3),  # blocks of 64
    ],
    ids=str,
)
def test_long_streams_in_a_line(case: Case, dtype: torch.dtype) -> None:
    check_in_line(case, dtype)


@pytest.mark.parametrize(
    "case",
    [
        Case(520, 200, (2,), batch=2, dim=4, dropout=0.3),  # four blocks with hidden keys
        Case(802, 140, (4,), queries=800, batch=2, dim=4),  # streams of queries that begin late
        Case(300, 0, (3,), dim=4),
    ],
    ids=str,
)
def test_windows_of_many_blocks_in_a_line(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_tiles, "LEAST_WINDOWS", 1)
    check_in_line(case, torch.float64)


@st.composite
def short_lines(draw: st.DrawFn) -> Case:
    stride = draw(st.integers(2, 4))
    longer = draw(st.sampled_from([r for r in range(stride) if max(r, stride - r) > 1]))
    return Case(
        keys=stride * draw(st.integers(80, 120)) + longer,
        window=draw(st.integers(0, 80)),
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
        patch.setattr(chunks_tiles, "LEAST_WINDOWS", 1)
        patch.setattr(chunks_tiles, "TILE_BYTES", tile_bytes)
        check_in_line(case, torch.float64)


def test_only_long_streams_lie_in_a_line() -> None:
    assert chunks_tiles.line_pitch(511, 511, 0) is None
    assert chunks_tiles.line_pitch(512, 512, 32) == 512
    assert chunks_tiles.line_pitch(513, 513, 33) is None  # sixteen windows are longer
    assert chunks_tiles.line_pitch(1023, 1023, 47) == 1024
    assert chunks_tiles.line_pitch(2048, 2049, 32) is None  # its queries begin late


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_stays_in_its_element_of_the_batch(which: str) -> None:
    torch.manual_seed(0)
    inputs = {name: torch.randn(3, 2048, 1, 16) for name in ("q", "k", "v")}
    inputs[which][1, -20:] = torch.nan
    for x in inputs.values():
        x.requires_grad_()
    out = banded_attention(**inputs, band=Band(32, (4,)), backend="chunks")
    out.sum().backward()
    for x in (out, *(x.grad for x in inputs.values())):
        assert x is not None
        assert x[[0, 2]].isfinite().all()
    assert out[1].isnan().any()
