from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lm.config.command_schemas import EvalConfig
from lm.measuring.evaluation import evaluate_command
from lm.measuring.results import (
    ResultError,
    find_results,
    main,
    one_line,
    result_name,
    write_result,
)
from tests.lm.evaluation_cases import random_text, save_run, tiny_model


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs with three results, one of them of a real evaluation."""
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path, tiny_model(), random_text(900), name="good")
    record = evaluate_command(EvalConfig(run="good"))
    assert record is not None
    folder = tmp_path / "runs"
    overlap = {"protocol": "overlap", "window": 16, "step": 4, "bpc": 9.75}
    write_result(folder / "good" / "results", record | overlap)
    write_result(folder / "bad" / "results", record | {"run": "bad|name", "bpc": 9.5})
    return folder


def test_the_table_has_all_results(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main([str(runs)])
    printed = capsys.readouterr().out
    assert printed == (runs / "results.md").read_text()
    lines = printed.splitlines()
    assert len(lines) == 2 + 3
    cells = {line.replace("\\|", "").count("|") for line in lines}
    assert len(cells) == 1
    assert "bad\\|name" in printed

    rows = list(csv.DictReader((runs / "results.csv").read_text().splitlines()))
    kept = [json.loads(path.read_text()) for path in runs.glob("*/results/*.json")]
    assert sorted(float(row["bpc"]) for row in rows) == sorted(r["bpc"] for r in kept)
    assert [float(row["bpc"]) for row in rows] == sorted(float(row["bpc"]) for row in rows)
    assert set(rows[0]) == set(kept[0])


def test_the_same_evaluation_replaces_itself(runs: Path) -> None:
    record = find_results(runs)[0]
    folder = runs / record["run"].partition("|")[0] / "results"
    path = write_result(folder, record | {"seconds": 99.0})
    assert len(find_results(runs)) == 3
    assert json.loads(path.read_text())["seconds"] == 99.0


def test_each_option_has_a_name_of_its_own(runs: Path) -> None:
    record = find_results(runs)[0]
    names = {result_name(record)}
    for key, value in {
        "window": 7,
        "step": 3,
        "context": "previous",
        "newlines": "skip",
        "max_chars": 9,
        "precision": "bf16-mixed",
        "model_sha256": "other",
        "split_sha256": "other",
    }.items():
        names.add(result_name(record | {key: value}))
    assert len(names) == 9


def test_what_is_no_result_is_named(runs: Path) -> None:
    broken = runs / "good" / "results" / "a.json"
    for text, reason in (("{", "not a result"), ("{}", "lacks"), ("[]", "not an object")):
        broken.write_text(text)
        with pytest.raises(ResultError, match=rf"a\.json.*{reason}"):
            find_results(runs)
    with pytest.raises(SystemExit, match=r"error: .*no results below it"):
        main([str(runs / "nowhere")])


def test_a_number_that_is_not_finite_is_not_written(runs: Path, tmp_path: Path) -> None:
    record = find_results(runs)[0] | {"bpc": float("nan")}
    with pytest.raises(ValueError, match="JSON compliant"):
        one_line(record)
    with pytest.raises(ValueError, match="JSON compliant"):
        write_result(tmp_path, record)
    assert not list(tmp_path.glob("stage*"))
