"""debug=profile measures steps of any model; lm.plan.step_times collects what it writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lm.config.checks import check_train
from lm.config.compose import train_config
from lm.config.schema import ConfigError
from lm.plan import precision
from lm.plan import step_times as measure_step
from lm.training.profiling import StepCost
from tests.system.micro import micro

COST = StepCost(
    device="a processor",
    precision="32-true",
    threads=1,
    processes=2,
    gradient_checkpointing=True,
    stage=1,
    sequence=32,
    sequences=1,
    seconds=2.0,
    update_seconds=0.5,
    peak_bytes=1_500_000_000,
    flops=8e9,
    attention_flops=2e9,
    matrix_rate=4e9,
    kinds={},
)


def test_a_table_and_a_trace_are_written(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"trainer__micro_batch": 1, "model__backend": "chunks"}
    run(stage="1", throwaway=True, profile__steps=2, **changed)
    folder = tmp_path / "runs" / "micro" / "trial" / "stage1"
    said = capsys.readouterr().out
    assert f"written to {folder}: profile.txt, profile.json, trace.json" in said
    assert "1 x 1 x 32 characters a step" in said
    table = (folder / "profile.txt").read_text()
    for line in ("banded attention", "matrix products", "one recorded step", "peak memory"):
        assert line in table and line in said
    names = {
        event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
    }
    assert {"aten::addmm", "aten::gelu"} <= names
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 1 + 2 + 1  # warm-up, timed, recorded
    cost = StepCost.read(folder / "profile.json")
    assert cost.seconds > cost.update_seconds > 0
    assert 1e8 < cost.peak_bytes < 1e10
    assert 0.5 < sum(cost.kinds.values()) < 1.05


def test_the_model_measured_is_the_experiments() -> None:
    config = train_config(["debug=profile", "experiment=enwik8_large"])
    assert (config.model.layers, config.data.name) == (30, "stdlib")
    assert config.throwaway and config.profile.steps
    config = train_config(["debug=profile", "model=tiny", "trainer.micro_batch=4"])
    assert (config.model.layers, config.trainer.micro_batch) == (6, 4)


def test_a_run_that_is_kept_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile.steps=1: measures instead of training"):
        check_train(micro(tmp_path, {"profile.steps": 1}))


def test_cases_become_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def train(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        (folder,) = [a.removeprefix("runs_dir=") for a in command if a.startswith("runs_dir=")]
        path = Path(folder) / "measured" / "trial" / "stage1" / "profile.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(vars(COST)))
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", train)
    measure_step.main(["--case", "two-processes", "trainer.precision=32-true"])
    assert asked[0][1] == "train.py" and "debug=profile" in asked[0]
    assert "trainer=ddp" in asked[0] and "trainer.precision=32-true" in asked[0]
    _, row = capsys.readouterr().out.splitlines()
    words = "two-processes 1 2 x 1 x 32 32-true 1 inputs 2 0.5 32 50% nan% 25% 1.50"
    assert " ".join(row.split()) == words
    assert replace(COST, kinds={"banded attention": 0.25}).attention_share == 0.25


def test_a_case_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, stderr="noise\nerror: the reason")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(SystemExit, match=r"stage=7 failed \(1\): error: the reason"):
        measure_step.main(["stage=7"])


def metrics(folder: str, precision: str) -> None:
    """A metrics.csv of eight steps; in bf16 each is 0.01 worse, and the last 0.09."""
    worse = 0.01 if precision == "bf16-mixed" else 0.0
    rows = [f"{8 - step + worse + (step == 7) * worse * 8},,10{step},1.5" for step in range(8)]
    rows[-1] = rows[-1].replace(",,", f",{4 - worse},")
    path = Path(folder) / "measured" / "trial" / "stage1" / "metrics.csv"
    path.parent.mkdir(parents=True)
    head = "train_bpc,val_bpc,characters_per_second,memory_gb"
    path.write_text("\n".join([head, *rows]))


def test_precisions_are_held_against_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def train(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        given = dict(argument.split("=", 1) for argument in command[2:])
        assert given["schedule.stages.1.steps"] == "8" and given["model.layers"] == "2"
        metrics(given["runs_dir"], given["trainer.precision"])
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", train)
    precision.main(["--steps", "8", "--json", str(tmp_path / "out.json"), "model.layers=2"])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split()[:1] + row.split()[3:] == (
        ["bf16-mixed", "0.02000", "0.09000", "+0.05000", "-0.01000", "104", "1.50"]
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["bf16-mixed"]["difference"]["val"] == pytest.approx(-0.01)
    assert written["32-true"]["difference"]["largest"] == 0
