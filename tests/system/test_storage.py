"""A disk that fills up and folders that take no files: a loud end, and nothing lost."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from lm.config.schema import UserError
from lm.errors import WriteError
from lm.model.checkpoint import load_checkpoint
from lm.training.module import TrainingModule
from lm.training.run import train
from tests.system.conftest import Reference
from tests.system.micro import micro, outcome
from tests.system.storage import SmallDisk, forbidden, immutable

Run = Callable[..., None]
Closing = Callable[[Path], AbstractContextManager[None]]


def at_step_6(folder: Path, reference: Reference) -> Path:
    """The micro run's folder of checkpoints, one step before the end of stage 1."""
    stage = Path("runs") / "micro" / "stage1"
    shutil.copytree(reference.folder / stage, folder / stage)
    checkpoints = folder / stage / "checkpoints"
    (checkpoints / "previous.ckpt").replace(checkpoints / "last.ckpt")
    return checkpoints


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(
    small_disk: SmallDisk, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_disk.folder
    checkpoints = at_step_6(folder, reference)
    last = checkpoints / "last.ckpt"
    before = last.read_bytes()
    step = TrainingModule.training_step

    def filling(self: TrainingModule, *args: object) -> object:
        small_disk.fill(checkpoints / "best.ckpt")
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", filling)
        with pytest.raises(WriteError, match=r"cannot be written \(No space left on device\)"):
            train(micro(folder))
    assert last.read_bytes() == before
    small_disk.free()
    assert {path.name for path in checkpoints.iterdir()} == {"best.ckpt", "last.ckpt"}
    train(micro(folder))
    assert outcome(micro(folder)) == reference.outcome


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, the system lets no file grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_quota_that_cuts_a_save_in_half_keeps_the_last_checkpoint(
    tmp_path: Path, reference: Reference
) -> None:
    checkpoints = at_step_6(tmp_path, reference)
    last = checkpoints / "last.ckpt"
    before = last.read_bytes()
    micro(tmp_path)
    with largest_file(len(before) // 2), pytest.raises(WriteError, match="File too large"):
        train(micro(tmp_path))
    assert last.read_bytes() == before
    assert {path.name for path in checkpoints.iterdir()} <= {"best.ckpt", "last.ckpt"}
    train(micro(tmp_path))
    assert outcome(micro(tmp_path)) == reference.outcome


@pytest.mark.parametrize("closing", [immutable, forbidden])
def test_a_folder_that_takes_no_files_is_named_and_loses_none(
    closing: Closing, tmp_path: Path, reference: Reference
) -> None:
    checkpoints = at_step_6(tmp_path, reference)
    micro(tmp_path)
    refused = "(Operation not permitted|Permission denied)"
    with closing(checkpoints), pytest.raises(WriteError) as error:
        train(micro(tmp_path))
    name = f"{checkpoints}/(best|last).ckpt"
    assert error.match(rf"^{name}: cannot be written \({refused}\)$")
    assert load_checkpoint(checkpoints / "last.ckpt")["step"] == 6
    train(micro(tmp_path))
    assert outcome(micro(tmp_path)) == reference.outcome


@pytest.mark.parametrize("closing", [immutable, forbidden])
def test_a_place_for_runs_that_takes_no_files_is_refused_at_once(
    closing: Closing, run: Run, tmp_path: Path
) -> None:
    micro(tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    with closing(runs), pytest.raises(UserError, match=f"{runs}.*: .*cannot be written"):
        run(stage="1")
    assert not list(runs.iterdir())


@pytest.mark.parametrize("closing", [immutable, forbidden])
def test_a_text_in_a_folder_that_takes_no_files_can_be_trained_on(
    closing: Closing, run: Run, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    text = micro(texts).data.path
    with closing(texts):
        run(stage="1", data__path=text, data__root=str(texts), schedule__stages__1__steps=1)
    assert [path.name for path in texts.iterdir()] == ["text"]
