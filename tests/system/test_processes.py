"""Several processes of one run: the same losses, one end for all, nothing started twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.micro import metrics, micro, stage_folders
from tests.system.moments import ROOT
from tests.system.trial import Nursery, Trial

# Gradient checkpointing is on in the micro run; one sequence at a time leaves 8, 4 or 2 to add up.
SAME = {
    "stage": "1",
    "schedule.stages.1.batch": 8,
    "schedule.stages.1.steps": 4,
    "trainer.micro_batch": 1,
    "trainer.log_every": 1,
    "trainer.save_every": 4,
    "validation.every": 4,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
}


def run_of(folder: Path, devices: int, **options: Any) -> Trial:
    """A run that starts its other processes itself."""
    micro(folder)
    return Trial(str(folder), SAME | {"trainer.devices": devices}, **options)


def test_one_two_and_four_processes_have_the_same_losses(tmp_path: Path, nursery: Nursery) -> None:
    rows = {}
    for devices in (1, 2, 4):
        trial = run_of(tmp_path / str(devices), devices)
        assert nursery.run(trial) == [0], trial.log.read_text()
        rows[devices] = metrics(stage_folders(micro(tmp_path / str(devices)))[0])
    assert [row[0] for row in rows[1]] == ["1", "2", "3", "4"]
    for devices in (2, 4):
        for expected, found in zip(rows[1], rows[devices], strict=True):
            for a, b in zip(expected, found, strict=True):
                assert a == b or float(a) == pytest.approx(float(b), rel=1e-5)


def test_two_runs_at_once_find_a_place_to_meet_each(tmp_path: Path, nursery: Nursery) -> None:
    trials = [run_of(tmp_path / name, 2) for name in ("a", "b")]
    assert nursery.run(*trials) == [0, 0], trials[0].log.read_text() + trials[1].log.read_text()
    first, second = (metrics(stage_folders(micro(tmp_path / name))[0]) for name in ("a", "b"))
    assert first == second


# Runs in each new interpreter whose PYTHONPATH leads here; only the run's other process is meant.
FAULTS = {
    "start": "open(NOTE, 'w'); sys.stderr.write('no such device\\n'); os._exit(3)",
    "step": """
from lm.training.module import TrainingModule
step = TrainingModule.training_step
def training_step(self, *args):
    if self.step == 2:
        open(NOTE, 'w')
        raise RuntimeError("the third step fails")
    return step(self, *args)
TrainingModule.training_step = training_step
""",
}


def faulty(folder: Path, fault: str) -> Trial:
    """A run whose second process, which the first one starts, fails."""
    folder.mkdir()
    code = FAULTS[fault].replace("NOTE", repr(str(folder / "failed")))
    (folder / "sitecustomize.py").write_text(
        f"import os, sys\nif 'lm.training.child_process' in sys.orig_argv:\n    exec({code!r})\n"
    )
    return run_of(folder, 2, env={"PYTHONPATH": str(folder)}, true_workers=True)


def test_when_one_fails_all_end_within_a_minute_with_its_message(
    tmp_path: Path, nursery: Nursery
) -> None:
    trials = [faulty(tmp_path / fault, fault) for fault in FAULTS]
    assert nursery.run(*trials) == [1, 1]
    said = [trial.log.read_text() for trial in trials]
    assert "no such device" in said[0]
    assert "stopped by the end of process 1 of 2 (exit status 3)" in said[0]
    assert "RuntimeError: the third step fails" in said[1]
    assert "stopped by the end of process 1 of 2 (exit status 1)" in said[1]
    for trial in trials:  # the last thing that it said, after the other one's failure
        failed = (Path(trial.folder) / "failed").stat().st_mtime
        assert trial.log.stat().st_mtime - failed < 60


SMALL = [
    "model=tiny",
    "model.layers=1",
    "schedule=overfit",
    "schedule.strides=[1]",
    "schedule.stages.1.windows=[4]",
    "schedule.stages.1.sequence=32",
    "schedule.stages.1.batch=4",
    "schedule.stages.1.steps=3",
    "data=stdlib",
    "validation.characters=64",
    "trainer=ddp",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """train.py on two processes, from another folder than the checkout."""
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *SMALL, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def files(folder: Path) -> dict[str, Any]:
    """What lies directly in a folder, and the stages of the runs in it."""
    runs = folder / "runs"
    stages = {str(path.relative_to(runs)) for path in runs.glob("*/*") if path.is_dir()}
    return {"files": {path.name for path in folder.iterdir()}, "stages": stages}


@pytest.mark.slow
def test_a_sweep_and_another_run_at_once_train_each_thing_once(tmp_path: Path) -> None:
    with (
        start(tmp_path / "sweep", "-m", "name=a,b") as sweep,
        start(tmp_path / "other", "name=c") as other,
    ):
        said, also = sweep.communicate(timeout=120)[0], other.communicate(timeout=120)[0]
    assert (sweep.returncode, other.returncode) == (0, 0), said + also
    assert said.count("stage 1: 3 steps") == 2 and also.count("stage 1: 3 steps") == 1
    assert files(tmp_path / "sweep") == {"files": {"runs"}, "stages": {"a/stage1", "b/stage1"}}
    assert files(tmp_path / "other") == {"files": {"runs"}, "stages": {"c/stage1"}}
