"""slurm/train.sbatch under stand-ins for sbatch and srun: what it starts, and with what."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lm.config.command_line import CONF

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "train.sbatch"

SRUN = """#!/bin/bash
echo "srun $*" >> "$CALLS"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
PYTHON = """#!/bin/bash
echo "python $*" >> "$CALLS"
echo "port $MASTER_PORT threads $OMP_NUM_THREADS folder $PWD" >> "$CALLS"
exit "${STATUS:-0}"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder of stand-ins on PATH, and the environment of a job."""
    for name, text in {"srun": SRUN, "python-stub": PYTHON}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "LONGCHAR_PYTHON": str(tmp_path / "python-stub"),
        "SLURM_JOB_ID": "40123",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def submit(slurm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script from another folder, as Slurm does."""
    spooled = slurm / "slurm_script"
    spooled.write_text(SCRIPT.read_text())
    return subprocess.run(
        ["bash", str(spooled), *arguments], cwd=slurm, capture_output=True, text=True, check=False
    )


def options() -> dict[str, str]:
    lines = [line.split(" ", 1)[1] for line in SCRIPT.read_text().splitlines() if "#SBATCH" in line]
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


def test_it_starts_the_whole_schedule_from_the_checkout(slurm):
    assert submit(slurm, "experiment=enwik8_large", "seed=2").returncode == 0
    srun, python, settings = (slurm / "calls").read_text().splitlines()
    assert srun.startswith("srun --kill-on-bad-exit=1 ")
    assert python == "python train.py trainer=slurm stage=all experiment=enwik8_large seed=2"
    assert settings == f"port 20123 threads 3 folder {ROOT}"


def test_a_requeued_job_runs_the_same_command(slurm):
    for _ in range(2):
        submit(slurm, "seed=2")
    first, second = (slurm / "calls").read_text().split("srun ")[1:]
    assert first == second


def test_its_failure_is_the_jobs(slurm, monkeypatch):
    monkeypatch.setenv("STATUS", "7")
    assert submit(slurm).returncode == 7


def test_submitted_from_elsewhere_it_says_so(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(slurm))
    done = submit(slurm)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"error: {slurm} has no train.py; submit from the root of the checkout"
    )
    assert not (slurm / "calls").exists()


def test_slurm_warns_the_tasks_and_may_requeue_the_job():
    given = options()
    assert given["--signal"].startswith("USR1@")  # to the tasks, not with B: to the script
    assert "--requeue" in given
    assert given["--open-mode"] == "append"
    assert not {"--gpus-per-task", "--gpu-bind"} & given.keys()


def test_the_preset_takes_the_jobs_size(monkeypatch):
    from lm.config.compose import train_config

    assert train_config(["trainer=slurm"]).trainer.devices == 1
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_NNODES", "2")
    trainer = train_config(["trainer=slurm"]).trainer
    assert (trainer.devices, trainer.nodes) == (4, 2)


@pytest.fixture
def launcher(monkeypatch):
    """Submitit's own part of the launcher, if it is not installed: the names that it knows."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    if importlib.util.find_spec("submitit") is None:
        names = ["timeout_min", "cpus_per_task", "tasks_per_node", "nodes", "gres"]
        known = dict.fromkeys([*names, "signal_delay_s", "max_num_timeout"])
        store.store("submitit_slurm", known, group="hydra/launcher", provider="stand-in")


def test_the_sweeps_launcher_composes(launcher):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        given = ["hydra/launcher=slurm", "hydra.launcher.gres=gpu:2"]
        config = compose("train", given, return_hydra_config=True).hydra.launcher
    # A job is put back into the queue as often as it takes, and its run is warned five minutes
    # before the limit.
    assert (config.gres, config.signal_delay_s) == ("gpu:2", 300)
    assert config.max_num_timeout >= 20
