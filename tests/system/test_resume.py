"""A stopped run that goes on repeats, to the bit, what it would have done without the stop."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lm.training.callbacks
import lm.training.module
import lm.training.saving
from lm.config.schema import Config
from lm.model.checkpoint import load_checkpoint
from lm.training.module import TrainingModule
from lm.training.run import train
from tests.system.conftest import Reference
from tests.system.micro import STEPS, metrics, micro, outcome, stage_folders, state
from tests.system.moments import terminate
from tests.system.trial import Nursery, Trial


def test_how_often_the_state_is_saved_changes_nothing(reference: Reference) -> None:
    each = outcome(micro(reference.folder, {"name": "each"}))
    assert each == reference.outcome
    assert len(reference.steps) == sum(STEPS.values())


def refuse_other_states(config: Config, reference: Reference) -> None:
    """Every checkpoint holds the state of a step border of the undisturbed run."""
    for folder in stage_folders(config):
        for name in ("last", "previous"):
            path = folder / "checkpoints" / f"{name}.ckpt"
            if path.exists():
                found = load_checkpoint(path)
                expected = reference.steps[found["stage"]["number"], found["step"]]
                assert found["counters"]["border_pending"] in (True, False)
                if found["counters"]["border_pending"]:  # stopped in the border's validation
                    ignored = {"counters", "bpc", "format"}
                    assert without(state(found), ignored) == without(expected, ignored)
                else:
                    assert without(state(found), {"format"}) == expected


def without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("terminate", 128 + signal.SIGTERM),
        ("interrupt", 128 + signal.SIGINT),
        ("hang up", 128 + signal.SIGHUP),
        ("requeue", 128 + signal.SIGUSR1),
    ],
)
def test_stops_at_any_moment_change_nothing(
    action: str, code: int, tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    draw = random.Random(action)
    config = micro(tmp_path)
    env = slurm_job(tmp_path) if action == "requeue" else {}
    for count in range(1, 4):
        at = draw.randrange(1, reference.moments // 3)
        trial = Trial(str(tmp_path), at=at, action=action, env=env)
        assert nursery.run(trial) == [code], trial.log.read_text()
        assert "the same command goes on from the last step" in trial.log.read_text()
        refuse_other_states(config, reference)
        if env:
            assert (tmp_path / "calls").read_text() == "requeue 7_3\n" * count
    assert nursery.run(Trial(str(tmp_path), env=env)) == [0]
    assert outcome(config) == reference.outcome


def slurm_job(folder: Path) -> dict[str, str]:
    """The environment of task 3 of array job 7, with a stand-in for scontrol."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n')
    scontrol.chmod(0o755)
    path = f"{scontrol.parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    return {"PATH": path} | job


def stop_in(monkeypatch: pytest.MonkeyPatch, where: object, name: str, call: int) -> None:
    """Ask the run to end when the function is called for the `call`-th time."""
    calls = 0
    function = getattr(where, name)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            terminate()
        return function(*args, **kwargs)

    monkeypatch.setattr(where, name, stopping)


@pytest.mark.parametrize(
    ("where", "name", "call", "stage", "step", "pending"),
    [
        pytest.param(TrainingModule, "training_step", 1, 1, None, False, id="before any step"),
        pytest.param(TrainingModule, "training_step", 4, 1, 1, False, id="between micro-batches"),
        pytest.param(TrainingModule, "training_step", 7, 1, 3, False, id="first of a step"),
        pytest.param(lm.training.callbacks, "stream", 1, 1, 3, True, id="in a validation"),
        pytest.param(
            lm.training.callbacks, "stream", 3, 1, 7, True, id="in a stage's last validation"
        ),
        pytest.param(lm.training.callbacks, "summed", 1, 1, 3, False, id="in a border"),
        pytest.param(lm.training.module, "set_learning_rate", 5, 1, 5, False, id="in an update"),
        pytest.param(lm.training.saving, "write_text", 2, 1, 3, False, id="in a save"),
        pytest.param(lm.training.saving, "save_checkpoint", 5, 1, 6, False, id="before a save"),
        pytest.param(TrainingModule, "training_step", 15, 2, None, False, id="in the next stage"),
        pytest.param(lm.training.callbacks, "stream", 5, 2, 5, True, id="at the very end"),
    ],
)
def test_stops_where_it_hurts(
    where: object,
    name: str,
    call: int,
    stage: int,
    step: int | None,
    pending: bool,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = micro(tmp_path)
    with monkeypatch.context() as patch:
        stop_in(patch, where, name, call)
        with pytest.raises(SystemExit) as end:
            train(config)
    assert end.value.code == 143
    last = stage_folders(config)[-1] / "checkpoints" / "last.ckpt"
    assert stage_folders(config)[-1].name == f"stage{stage}"
    if step is None:
        assert not last.exists()
    else:
        found = load_checkpoint(last)
        assert (found["step"], found["counters"]["border_pending"]) == (step, pending)
    refuse_other_states(config, reference)
    train(config)
    assert outcome(config) == reference.outcome


def test_each_step_reads_the_same_crops_at_the_same_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[tuple[int, ...]] = []
    rates: list[float] = []
    read, set_rate = lm.training.module.read_batch, lm.training.module.set_learning_rate

    def read_batch(*args: Any) -> Any:
        samples.append(args[2:])
        return read(*args)

    def set_learning_rate(optimizer: Any, lr: float) -> None:
        rates.append(lr)
        set_rate(optimizer, lr)

    monkeypatch.setattr(lm.training.module, "read_batch", read_batch)
    monkeypatch.setattr(lm.training.module, "set_learning_rate", set_learning_rate)

    def taken(folder: str, stop: int) -> tuple[list[tuple[int, ...]], list[float]]:
        samples.clear(), rates.clear()
        config = micro(tmp_path / folder, {"stage": "1"})
        if stop:
            with monkeypatch.context() as patch:
                stop_in(patch, TrainingModule, "training_step", stop)
                with pytest.raises(SystemExit):
                    train(config)
            samples[2 * ((stop - 1) // 2) :] = []  # of the step that was dropped, or read ahead
            rates[(stop - 1) // 2 :] = []
            train(config)
        else:
            train(config)
        return list(samples), list(rates)

    expected = taken("whole", 0)
    assert [first for _, first, *_ in expected[0]] == list(range(0, 4 * STEPS[1], 2))
    assert expected[1] == [1e-2 * min(1, (step + 1) / 4) for step in range(STEPS[1])]
    for stop in (2, 3, 8):
        assert taken(f"stopped{stop}", stop) == expected


def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    now = [1e9]

    def jumping() -> float:
        now[0] += random.Random(now[0]).uniform(-1e6, 1e6)
        return now[0]

    monkeypatch.setattr(time, "time", jumping)
    config = micro(tmp_path)
    train(config)
    assert outcome(config) == reference.outcome


def test_rows_past_the_checkpoint_are_dropped_and_come_again(
    tmp_path: Path, reference: Reference
) -> None:
    config = micro(tmp_path, {"stage": "1"})
    train(config)
    folder = stage_folders(config)[0]
    expected = metrics(folder)
    last = folder / "checkpoints" / "last.ckpt"
    last.with_name("previous.ckpt").replace(last)  # as if it had been killed after its last row
    with (folder / "metrics.csv").open("a") as file:
        file.write("8,1024,4.5")  # and while writing the next
    train(config)
    assert metrics(folder) == expected == reference.outcome["stage1/metrics"]


def test_a_finished_run_is_left_alone(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    run()
    said = capsys.readouterr().out
    assert "stage 1 is finished" in said and "holds step 7 of 7" in said
    assert "stage 2 is finished" in said and "overwrite=true starts it again" in said
    files.pop(tmp_path / "runs" / "micro" / ".lock")
    assert files == {path: path.stat().st_mtime_ns for path in files}
