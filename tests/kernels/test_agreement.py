"""Every backend computes what the dense oracle does: output and all gradients."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import BackendError
from kernels.torch_backends import tiles as chunks_tiles
from tests.kernels.tester import BACKENDS, Case, Comparison, types_of

CASES = [
    Case(20, 0, (1, 2)),
    Case(33, 50, (1, 2), extra_rows=3),
    Case(40, 15, (1, 3), dim=16),  # window + 1 == dim
    Case(1, 7, (1, 2)),
    Case(2, 1, (2, 1)),
    Case(31, 6, (1, 2), batch=3),
    Case(66, 9, (4, 4)),
    Case(97, 12, (1, 2, 3, 4), extra_rows=5),
    Case(50, 8, (5, 1), queries=1, batch=2),
    Case(90, 20, (1, 4), queries=1),
    Case(90, 20, (1, 3), queries=37, batch=2),
    Case(9, 3, (2**40, 4), queries=5),
    Case(30, 29, (1,), dim=5, scale=0.7),
    Case(70, 33, (2, 1), extra_rows=1),
]
LONG = [
    Case(530, 64, (1, 3), batch=2),
    Case(420, 300, (1, 2), dropout=0.3),
    Case(400, 40, (1, 2), queries=330),
]
BOTH = [(True, 0.3), (False, 0.0)]
VARIANTS = [*BOTH, (True, 0.0), (False, 0.3)]


@pytest.fixture(scope="module")
def comparisons() -> dict[Case, Comparison]:
    return {}


def expand(cases: list[Case], variants: list[tuple[bool, float]]) -> list[Case]:
    return [
        dataclasses.replace(case, relative=relative, dropout=dropout)
        for case in cases
        for relative, dropout in variants
    ]


@pytest.mark.parametrize(
    "case", [*expand(CASES, BOTH), *expand([CASES[7], CASES[10]], VARIANTS[2:])], ids=str
)
def test_small(case: Case, backend: str, comparisons: dict[Case, Comparison]) -> None:
    comparison = comparisons.setdefault(case, Comparison.of(case))
    comparison.check_in_every_type(backend)


@pytest.mark.parametrize("backend", ["chunks", "tvm"])
@pytest.mark.parametrize("case", [*expand(LONG[:1], BOTH), *LONG[1:]], ids=str)
def test_many_blocks(case: Case, backend: str, comparisons: dict[Case, Comparison]) -> None:
    comparison = comparisons.setdefault(case, Comparison.of(case))
    comparison.check_in_every_type(backend)


@pytest.mark.parametrize("tile_bytes", [1, 2**14, 2**16])
@pytest.mark.parametrize("case", [LONG[0], CASES[7]], ids=str)
def test_chunks_whatever_the_tiles(
    case: Case,
    tile_bytes: int,
    comparisons: dict[Case, Comparison],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks_tiles, "TILE_BYTES", tile_bytes)
    case = dataclasses.replace(case, dropout=0.3)
    comparisons.setdefault(case, Comparison.of(case)).check("chunks", torch.float64)


@pytest.mark.parametrize("relative", [False, True])
def test_large_scores(backend: str, relative: bool) -> None:
    case = Case(80, 30, (1, 2), relative=relative, size=30.0)
    Comparison.of(case).check_large_scores(backend)


def test_all_scores_alike(backend: str) -> None:
    case = Case(70, 20, (1, 3), relative=False, size=0.0)
    Comparison.of(case).check_in_every_type(backend)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    keys = draw(st.integers(1, 150))
    return Case(
        keys=keys,
        window=draw(st.integers(0, keys + 5)),
        strides=tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))),
        queries=draw(st.integers(1, keys)),
        batch=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([1, 3, 8])),
        relative=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.4])),
        extra_rows=draw(st.integers(0, 2)),
    )


@given(case=cases())
@settings(max_examples=15)
def test_chunks_on_random_cases(case: Case) -> None:
    Comparison.of(case).check("chunks", torch.float64)


@given(case=cases())
@settings(max_examples=25)
def test_tvm_on_random_cases(case: Case) -> None:
    types_of("tvm")
    comparison = Comparison.of(dataclasses.replace(case, dim=16))
    comparison.check("tvm", torch.float32, least=comparison.remains)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [32, 48, 80, 128])  # 80: five vectors, which no group divides
@given(case=cases())
@settings(max_examples=80)
def test_many_random_cases(dim: int, case: Case) -> None:
    Comparison.of(case).check("chunks", torch.float64)
    types_of("tvm")
    comparison = Comparison.of(dataclasses.replace(case, dim=dim))
    comparison.check("tvm", torch.float32, least=comparison.remains)


def test_tvm_refuses_float64() -> None:
    types_of("tvm")
    with pytest.raises(BackendError, match="float64"):
        Comparison.of(Case(5, 2)).run("tvm", torch.float64)


def test_every_backend_is_tested() -> None:
    from kernels.backends import FASTEST_FIRST

    assert set(BACKENDS) | {"dense"} == set(FASTEST_FIRST)
