"""Signals that come twice, find nobody who could react, or want a job to be requeued in vain."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.system.conftest import Reference
from tests.system.micro import micro, outcome
from tests.system.test_kills import refuse_damage
from tests.system.trial import Nursery, Trial


@pytest.mark.parametrize(("at", "again"), [(9000, 40), (20000, 400)])
def test_a_second_ctrl_c_ends_at_once_and_damages_nothing(
    at: int, again: int, tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    trial = Trial(str(tmp_path), at=at, action="interrupt", again=again)
    micro(tmp_path)
    assert nursery.run(trial)[0] == -signal.SIGINT, trial.log.read_text()
    assert "stopped by" not in trial.log.read_text()
    refuse_damage(tmp_path, at)
    assert nursery.run(Trial(str(tmp_path))) == [0]
    assert outcome(micro(tmp_path)) == reference.outcome


def test_a_main_thread_that_cannot_react_is_saved_by_another(
    tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    micro(tmp_path)
    said = set()
    for at in (9000, 9500, 10500):
        trial = Trial(str(tmp_path), at=at, action="get stuck")
        assert nursery.run(trial) == [143], trial.log.read_text()
        said.add(trial.log.read_text().splitlines()[-1])
    middle = "stopped by SIGTERM in the middle of a computation"
    between = (
        "stopped by SIGTERM between two steps, which did not end; what was saved before is whole"
    )
    assert middle in said and said <= {middle, between}
    assert nursery.run(Trial(str(tmp_path))) == [0]
    assert outcome(micro(tmp_path)) == reference.outcome


def test_a_job_that_slurm_does_not_take_back_is_saved_and_named(
    tmp_path: Path, nursery: Nursery
) -> None:
    micro(tmp_path)
    env = {"SLURM_JOB_ID": "10", "PATH": str(tmp_path)}
    trial = Trial(str(tmp_path), at=9000, action="requeue", env=env)
    assert nursery.run(trial) == [1]
    said = trial.log.read_text().splitlines()[-1]
    assert said.startswith("error: the run is saved, but scontrol requeue 10 failed (")
    assert said.endswith("); submit it again with the same command")
