"""Several processes: the same numbers, one folder, and an end for all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lm.config.schema import ConfigError
from lm.machine.cluster import seat_from_environment
from lm.training.processes import Others
from lm.training.signals import Stop, Stopped
from tests.system.micro import metrics, micro, outcome, stage_folders
from tests.system.trial import Nursery, Trial


def pair(folder: Path, changed: dict[str, Any] | None = None, at: int = -1) -> list[Trial]:
    """Two processes as torchrun would start them; the fault is the first one's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    values = {"trainer.devices": 2, "trainer.micro_batch": 1} | (changed or {})
    return [
        Trial(
            str(folder),
            values,
            at if rank == 0 else -1,
            "terminate",
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A run of two processes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("two")
    micro(folder)
    trials = pair(folder)
    assert nursery.run(*trials) == [0, 0], trials[1].log.read_text()
    return folder


def test_two_processes_write_as_one(two: Path) -> None:
    config = micro(two)
    assert [folder.name for folder in stage_folders(config)] == ["stage1", "stage2"]
    assert len(metrics(stage_folders(config)[0])) == 5
    assert not (two / "log1.txt").read_text()


def test_on_two_processes_stops_change_nothing(two: Path, tmp_path: Path, nursery: Nursery) -> None:
    micro(tmp_path)
    for at in (9000, 14000):
        trials = pair(tmp_path, at=at)
        assert nursery.run(*trials)[0] == 143, trials[0].log.read_text()
    assert nursery.run(*pair(tmp_path)) == [0, 0]
    assert outcome(micro(tmp_path)) == outcome(micro(two))


PLAIN = {
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "stage": "1",
    "schedule.stages.1.steps": 4,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> list[tuple[str, ...]]:
    """What one process writes without dropout."""
    folder = tmp_path_factory.mktemp("alone")
    micro(folder)
    assert nursery.run(Trial(str(folder), PLAIN)) == [0]
    return metrics(stage_folders(micro(folder))[0])


def refuse_more_than_rounding(folder: Path, expected: list[tuple[str, ...]]) -> None:
    found = metrics(stage_folders(micro(folder))[0])
    for row, other in zip(expected, found, strict=True):
        for a, b in zip(row, other, strict=True):
            assert a == b or float(a) == pytest.approx(float(b), abs=1e-5)


def test_without_dropout_the_number_of_processes_changes_rounding_only(
    alone: list[tuple[str, ...]], tmp_path: Path, nursery: Nursery
) -> None:
    for name, trials in {
        "two": pair(tmp_path / "two", PLAIN),
        "whole": [Trial(str(tmp_path / "whole"), PLAIN | {"trainer.micro_batch": 4})],
    }.items():
        micro(tmp_path / name)
        assert set(nursery.run(*trials)) == {0}, trials[0].log.read_text()
        refuse_more_than_rounding(tmp_path / name, alone)


def test_one_process_goes_on_where_two_stopped(
    alone: list[tuple[str, ...]], tmp_path: Path, nursery: Nursery
) -> None:
    micro(tmp_path)
    assert nursery.run(*pair(tmp_path, PLAIN, at=9000))[0] == 143
    assert nursery.run(Trial(str(tmp_path), PLAIN)) == [0]
    refuse_more_than_rounding(tmp_path, alone)


def wait_until(condition: Any, seconds: float) -> None:
    """Fail if the condition does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children(parent: int) -> list[int]:
    """The processes that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(parts[1]) == parent:
            found.append(int(path.parent.name))
    return found


def gone(process: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [("first", signal.SIGKILL, -9), ("other", signal.SIGKILL, 1), ("first", signal.SIGINT, 130)],
)
def test_when_one_process_ends_all_do(
    victim: str, number: signal.Signals, code: int, tmp_path: Path, nursery: Nursery
) -> None:
    micro(tmp_path)
    changed = {
        "trainer.devices": 2,
        "trainer.micro_batch": 1,
        "stage": "1",
        "schedule.stages.1.steps": 100_000,
        "trainer.save_every": 5,
    }
    trial = Trial(str(tmp_path), changed, true_workers=number == signal.SIGINT)
    (first,) = nursery.start(trial)
    last = tmp_path / "runs" / "micro" / "stage1" / "checkpoints" / "last.ckpt"
    try:
        wait_until(lambda: last.exists() or gone(first), 150)
        (other,) = children(first)
        os.kill(first if victim == "first" else other, number)
        wait_until(lambda: gone(first) and gone(other), 30)
    finally:
        if not gone(first):
            os.kill(first, signal.SIGKILL)
        status = nursery.wait()
    assert status == [code], trial.log.read_text()
    if victim == "other":
        said = trial.log.read_text()
        assert "stopped by the end of process 1 of 2 (exit status -9)" in said


def test_a_process_that_ends_too_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    asked: list[Any] = []
    monkeypatch.setattr(stop, "ask_main_thread", asked.append)
    others = Others(2, stop)
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        others._watch(1, process)
    assert [(str(reason), reason.code) for reason in asked] == [
        ("the end of process 1 of 2 (exit status 3)", 1)
    ]


def test_a_connection_that_breaks_first_waits_for_the_reason() -> None:
    stop = Stop()
    others = Others(2, stop)
    others.running = [None]  # type: ignore[list-item]
    news = Stopped("the end of process 1 of 2 (exit status -9)", 1)
    timer = threading.Timer(0.1, setattr, (stop, "wanted", news))
    timer.start()
    with pytest.raises(Stopped, match="the end of process 1"):
        others.blame()
    timer.join()


@pytest.mark.parametrize(
    ("env", "devices", "message"),
    [
        ({"SLURM_NTASKS": "1"}, 2, "trainer.devices=2, .* expected 2 processes, srun says .* 1;"),
        ({"SLURM_NTASKS": "4"}, 2, "trainer.devices=2, .*Use `--ntasks-per-node=4` instead"),
        (
            {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"},
            2,
            "expected 2 processes, srun says there are 4",
        ),
    ],
)
def test_another_number_of_processes_is_refused(
    env: dict[str, str], devices: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
    for name, value in (slurm | {"SLURM_JOB_NAME": "train"} | env).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NODELIST", "node1")
    with pytest.raises(ConfigError, match=message):
        seat_from_environment(devices, 1)


def test_an_interactive_session_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert seat_from_environment(2, 1) is None


def test_nodes_need_a_launcher() -> None:
    with pytest.raises(ConfigError, match="trainer.nodes=2: this process knows of no others"):
        seat_from_environment(1, 2)
