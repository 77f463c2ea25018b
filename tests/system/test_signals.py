"""Signals that come twice, find nobody who could react, or want a job to be requeued in vain."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.system.conftest import Reference
from tests.system.micro import micro, outcome
from tests.system.test_kills import refuse_damage
from tests.system.trial import Nursery, Trial

STEP = ("lm.training.module", "TrainingModule.training_step")


@pytest.mark.parametrize(
    "second",
    [
        ("lm.training.saving", "refuse_weights"),
        ("lm.model.checkpoint", "_digest"),
        ("lm.machine.files", "flush_folder"),
    ],
)
def test_a_second_ctrl_c_ends_at_once_and_damages_nothing(
    second: tuple[str, str], tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    # The sixth step is dropped, the border after the fifth was not saved before.
    faults = [(*STEP, 12, "interrupt"), (*second, 1, "interrupt")]
    trial = Trial(str(tmp_path), faults=faults)
    micro(tmp_path)
    assert nursery.run(trial) == [-signal.SIGINT], trial.log.read_text()
    assert "stopped by" not in trial.log.read_text()
    refuse_damage(tmp_path, 0)
    assert nursery.run(Trial(str(tmp_path))) == [0]
    assert outcome(micro(tmp_path)) == reference.outcome


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (STEP, "in the middle of a computation"),
        (
            ("lm.training.callbacks", "summed"),
            "between two steps, which did not end; what was saved before",
        ),
    ],
)
def test_a_main_thread_that_cannot_react_is_saved_by_another(
    place: tuple[str, str], where: str, tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    micro(tmp_path)
    trial = Trial(str(tmp_path), faults=[(*place, 2, "get stuck")])
    assert nursery.run(trial) == [143], trial.log.read_text()
    assert f"stopped by SIGTERM {where}" in trial.log.read_text()
    assert nursery.run(Trial(str(tmp_path))) == [0]
    assert outcome(micro(tmp_path)) == reference.outcome


def test_a_job_that_slurm_does_not_take_back_is_saved_and_named(
    tmp_path: Path, nursery: Nursery
) -> None:
    micro(tmp_path)
    env = {"SLURM_JOB_ID": "10", "PATH": str(tmp_path)}
    trial = Trial(str(tmp_path), faults=[(*STEP, 2, "requeue")], env=env)
    assert nursery.run(trial) == [1]
    said = trial.log.read_text().splitlines()[-1]
    assert said.startswith("error: the run is saved, but scontrol requeue 10 failed (")
    assert said.endswith("); submit it again with the same command")
