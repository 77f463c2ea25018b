"""Killed at any moment, also inside a save, a run goes on and repeats the undisturbed one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lm.model.checkpoint import load_checkpoint
from tests.system.conftest import Reference
from tests.system.micro import micro, outcome, stage_folders
from tests.system.trial import Nursery, Trial

KILLED = -9
MOST_FILES = 4  # best, last, previous, and one that a killed process left unfinished


def kill_until(kills: int, seed: int, folder: Path, nursery: Nursery, reference: Reference) -> None:
    """Kill micro runs at random moments, over and over, until so many have been killed."""
    draw = random.Random(seed)
    done = number = 0
    while done < kills:
        number += 1
        place = folder / str(number)
        config = micro(place)
        while done < kills:
            at = draw.randrange(1, reference.moments)
            status = nursery.run(Trial(str(place), at=at))[0]
            log = Trial(str(place)).log.read_text()
            assert status in (KILLED, 0), log
            if status == 0:
                break
            done += 1
            refuse_damage(place, at)
        assert nursery.run(Trial(str(place))) == [0], Trial(str(place)).log.read_text()
        assert outcome(config) == reference.outcome, (seed, number)


def refuse_damage(folder: Path, at: int) -> None:
    """Whatever has a checkpoint's name is whole, and there are not too many files."""
    for stage in stage_folders(micro(folder)):
        files = list((stage / "checkpoints").iterdir())
        assert len(files) <= MOST_FILES, (at, files)
        for path in files:
            if path.suffix == ".ckpt":
                load_checkpoint(path)


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment_change_nothing(
    seed: int, tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    kill_until(10, seed, tmp_path, nursery, reference)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(100, 120))
def test_hundreds_of_kills_change_nothing(
    seed: int, tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    kill_until(15, seed, tmp_path, nursery, reference)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(200, 210))
def test_many_stops_from_outside_change_nothing(
    seed: int, tmp_path: Path, nursery: Nursery, reference: Reference
) -> None:
    draw = random.Random(seed)
    trial = Trial(str(tmp_path), at=1, action="terminate")
    config = micro(tmp_path)
    for _ in range(12):
        at = draw.randrange(1, reference.moments // 3)
        status = nursery.run(Trial(trial.folder, at=at, action="terminate"))[0]
        assert status in (143, 0), trial.log.read_text()
        refuse_damage(tmp_path, at)
    assert nursery.run(Trial(trial.folder)) == [0]
    assert outcome(config) == reference.outcome
