"""The benchmark commands run and write what they print."""

import json
from pathlib import Path

import pytest

from kernels.bench import cases as bench_cases
from kernels.bench import table as bench
from kernels.bench import targets as bench_targets
from kernels.bench import tiles as bench_tiles
from tests.kernels.tester import types_of


@pytest.fixture(autouse=True)
def needs_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    types_of("tvm")
    # It is for the whole process, and other tests measure memory.
    monkeypatch.setattr(bench_cases, "keep_freed_memory", lambda: None)


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    options = ["--heads", "2", "--dim", "16", "--repetitions", "1", "--threads", "1", "--no-memory"]
    bench.main(["40,3", *options, "--backends", "tvm", "chunks", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [(row["backend"], row["passes"]) for row in rows] == [
        (backend, passes) for backend in ("tvm", "chunks") for passes in ("forward", "both")
    ]
    pairs = 2 * (1 + 2 + 3 + 37 * 4)
    for row in rows:
        flops = pairs * 6 * 16 * (1 if row["passes"] == "forward" else 3)
        assert row["gflops"] * row["milliseconds"] == pytest.approx(flops * 1e-6)
        assert row["of_mm"] == pytest.approx(row["gflops"] / row["mm_gflops"])
    assert capsys.readouterr().out.count(" tvm ") == 2


def test_bench_tiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    bench_tiles.main(["--dim", "16", "--repetitions", "1", "--json", str(path)])
    rows = {row["product"]: row for row in json.loads(path.read_text())}
    assert set(rows) == {"scores", "rows", "columns"}
    assert all(row["of_mm"] > 0.01 for row in rows.values())
    assert "of mm" in capsys.readouterr().out


def test_bench_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_targets, "SPEED", {(40, 3, 0.0): (1e6, 0.0)})
    monkeypatch.setattr(bench_targets, "STRIDES", ((40, 3),))
    monkeypatch.setattr(bench_targets, "THREADS", ((40, 3, 1),))
    monkeypatch.setattr(bench_targets, "MEMORY", ((512, 600),))
    monkeypatch.setattr(bench_targets, "CHUNKS_STRIDES", ((40, 3),))
    measure = bench_targets.measure_memory

    def measure_one(case: bench.Case, passes: str, threads: int) -> dict[str, int] | None:
        """Measure one pass: each takes a process of its own."""
        if case.backend == "chunks":
            return {"temporary": case.window}
        return measure(case, passes, threads) if passes == "both" else {"temporary": 1}

    monkeypatch.setattr(bench_targets, "measure_memory", measure_one)
    path = tmp_path / "figures.json"
    bench_targets.main(
        ["--repetitions", "1", "--seconds", "0", "--threads", "1", "--json", str(path)]
    )
    figures = {(row["group"], row["passes"]): row for row in json.loads(path.read_text())}
    assert set(figures) == {(g, p) for g in bench_targets.GROUPS for p in ("forward", "both")}
    assert not figures["speed", "forward"]["met"]
    assert figures["speed", "both"]["met"]
    assert figures["memory", "both"]["met"]
    assert figures["chunks", "both"]["measured"] == 4
    assert capsys.readouterr().out.count("missed") >= 1
    with pytest.raises(SystemExit, match="'spped'; choose of speed"):
        bench_targets.main(["spped"])
