"""A job of slurm/train.sbatch that meets its time limit, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.config.compose import train_config
from lm.config.schema import Config
from lm.training.run import train
from tests.system.micro import metrics, outcome
from tests.system.moments import ROOT

STEPS = 60
# Starts the tasks of this node. Near the time limit, which is when the file $LIMIT comes to be, it
# sends them SIGUSR1, as `--signal=USR1@300` has it; a task that fails ends the others.
SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys, time

print("srun", *sys.argv[1:], file=open(os.environ["CALLS"], "a"))
command = [word for word in sys.argv[1:] if not word.startswith("--")]
number = int(os.environ["SLURM_NTASKS"])
tasks = []
for n in range(number):
    place = {{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "SLURM_NODEID": "0"}}
    tasks.append(subprocess.Popen(command, env=os.environ | place))
limit = pathlib.Path(os.environ["LIMIT"])
warned = False
while any(task.poll() is None for task in tasks):
    if limit.exists() and not warned:
        warned = True
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
    if any(task.poll() for task in tasks):
        time.sleep(2)
        for task in tasks:
            task.poll() is None and task.terminate()
    time.sleep(0.02)
sys.exit(max(128 - code if code < 0 else code for code in (task.returncode for task in tasks)))
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
"""


class Job:
    """A submitted job; each start has the same command line."""

    def __init__(self, folder: Path, tasks: int, *arguments: str) -> None:
        self.folder = folder
        self.arguments = arguments
        self.calls = folder / "calls"
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (programs / name).write_text(text.format(python=sys.executable))
            (programs / name).chmod(0o755)
        self.env = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "LONGCHAR_PYTHON": sys.executable,
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "40123",
            "SLURM_JOB_NAME": "longchar",
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "SLURM_NODELIST": "127.0.0.1",
            "SLURM_NNODES": "1",
            "SLURM_NTASKS": str(tasks),
            "SLURM_NTASKS_PER_NODE": str(tasks),
            "SLURM_CPUS_PER_TASK": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def start(self, limit: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """One start, up to its end or, once `limit` exists, to the time limit."""
        return subprocess.run(
            ["bash", str(ROOT / "slurm" / "train.sbatch"), *self.arguments],
            env=os.environ | self.env | {"LIMIT": str(limit)} | env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )


def arguments(folder: Path, **changed: Any) -> list[str]:
    """Of a run of seconds, for train.py."""
    text = folder / "text"
    if not text.exists():
        generator = np.random.default_rng(1)
        text.write_bytes(generator.choice(list(b"abcdefg \n"), 20_000).astype(np.uint8).tobytes())
    values = {
        "model": "tiny",
        "schedule": "overfit",
        "model.layers": 1,
        "model.dropout": 0.1,
        "schedule.strides": [1],
        "schedule.stages.1.windows": [4],
        "schedule.stages.1.sequence": 32,
        "schedule.stages.1.batch": 4,
        "schedule.stages.1.steps": STEPS,
        "data": "file",
        "data.path": text,
        "validation.characters": 64,
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.log_every": 1,
        "trainer.save_every": 4,
        "runs_dir": folder / "runs",
        "name": "job",
    }
    return [f"{key}={value}" for key, value in (values | changed).items()]


def typed(overrides: list[str]) -> Config:
    """The configuration of a job on one task."""
    return train_config(["stage=all", "trainer.threads=1", *overrides])


@pytest.mark.parametrize("tasks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_at_its_time_limit_a_job_saves_requeues_itself_and_goes_on(
    tasks: int, tmp_path: Path
) -> None:
    job = Job(tmp_path, tasks, *arguments(tmp_path, name="job"))
    stage = tmp_path / "runs" / "job" / "stage1"
    first = job.start(
        stage / "checkpoints" / "last.ckpt", SLURM_ARRAY_JOB_ID="40120", SLURM_ARRAY_TASK_ID="3"
    )
    assert first.returncode == 128 + signal.SIGUSR1, first.stderr
    assert "stopped by SIGUSR1; the same command goes on from the last step" in first.stderr
    reached = int(metrics(stage)[-1][0])
    assert 4 <= reached < STEPS
    second = job.start(tmp_path / "never", SLURM_RESTART_COUNT="1")
    assert second.returncode == 0, second.stderr
    assert f"from its own step {reached}" in second.stdout
    srun, requeue, again = job.calls.read_text().splitlines()
    assert requeue == "scontrol requeue 40120_3"
    assert srun == again

    whole = arguments(tmp_path, name="whole")
    if tasks == 1:
        train(typed(whole))
    else:
        assert Job(tmp_path, tasks, *whole).start(tmp_path / "never").returncode == 0
    results = [outcome(typed(arguments(tmp_path, name=name))) for name in ("job", "whole")]
    assert results[0] == results[1]
