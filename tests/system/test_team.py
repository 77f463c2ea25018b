"""Several processes: the same numbers, one folder, and an end for all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lm.config import ConfigError, TrainerConfig
from lm.processes import Others, seat_from_environment
from lm.stopping import Stop
from tests.system.micro import metrics, micro, outcome, stage_folders
from tests.system.moments import ROOT
from tests.system.trial import Nursery, Trial

CHILD = "lm.worker"


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
            common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
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


def test_without_dropout_the_number_of_processes_changes_rounding_only(
    tmp_path: Path, nursery: Nursery
) -> None:
    plain = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "stage": "1"}
    rows = []
    for name, trials in {
        "one": [Trial(str(tmp_path / "one"), plain)],
        "two": pair(tmp_path / "two", plain),
        "whole": [Trial(str(tmp_path / "whole"), plain | {"trainer.micro_batch": 4})],
    }.items():
        micro(tmp_path / name)
        assert set(nursery.run(*trials)) == {0}, trials[0].log.read_text()
        rows.append(metrics(stage_folders(micro(tmp_path / name))[0]))
    for other in rows[1:]:
        for expected, found in zip(rows[0], other, strict=True):
            for a, b in zip(expected, found, strict=True):
                assert a == b or float(a) == pytest.approx(float(b), abs=1e-5)


def test_one_process_goes_on_where_two_stopped(tmp_path: Path, nursery: Nursery) -> None:
    micro(tmp_path)
    changed = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "stage": "1"}
    whole = tmp_path / "whole"
    micro(whole)
    assert nursery.run(Trial(str(whole), changed)) == [0]
    assert nursery.run(*pair(tmp_path, changed, at=9000))[0] == 143
    assert nursery.run(Trial(str(tmp_path), changed)) == [0]
    expected, found = (metrics(stage_folders(micro(f))[0]) for f in (whole, tmp_path))
    assert [row[0] for row in found] == [row[0] for row in expected]
    for a, b in zip(expected, found, strict=True):
        assert float(a[2]) == pytest.approx(float(b[2]), abs=1e-5)


def launch(folder: Path) -> subprocess.Popen[bytes]:
    """A true start of two processes, long enough to be disturbed."""
    code = (
        # A shell ignores Ctrl-C for what it starts in the background, and that is inherited.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys\nfrom pathlib import Path\nfrom lm.run import train\n"
        "from tests.system.micro import micro\n"
        "train(micro(Path(sys.argv[1]), {'trainer.devices': 2, 'trainer.micro_batch': 1,"
        " 'stage': '1', 'schedule.stages.1.steps': 100000, 'trainer.save_every': 5,"
        " 'trainer.log_every': 1}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_until(condition: Any, seconds: float) -> None:
    """Fail if the condition does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children(parent: int) -> list[int]:
    """Worker processes that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_text()
        except OSError:
            continue  # it ended meanwhile
        if int(parts[1]) == parent and CHILD in command:
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
    victim: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    micro(tmp_path)
    with launch(tmp_path) as first:
        try:
            last = tmp_path / "runs" / "micro" / "stage1" / "checkpoints" / "last.ckpt"
            wait_until(lambda: last.exists() or first.poll() is not None, 150)
            (other,) = children(first.pid)
            os.kill(first.pid if victim == "first" else other, number)
            _, said = first.communicate(timeout=30)
            wait_until(lambda: gone(other), 30)
        finally:
            first.kill()
    assert first.returncode == code, said.decode()
    if victim == "other":
        assert b"stopped by the end of process 1 of 2 (exit status -9)" in said


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
        seat_from_environment(TrainerConfig(devices=devices))


def test_an_interactive_session_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert seat_from_environment(TrainerConfig(devices=2)) is None


def test_nodes_need_a_launcher() -> None:
    with pytest.raises(ConfigError, match="trainer.nodes=2: this process knows of no others"):
        seat_from_environment(TrainerConfig(nodes=2))
