"""trainer.compile changes the time of a step and nothing else."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lm.errors import UserError
from lm.model.checkpoint import load_checkpoint
from lm.model.compilation import check_compiler
from tests.system.micro import SMALLER, STAGES
from tests.system.moments import ROOT


def train(folder: Path, compiled: bool) -> dict:
    """The last checkpoint of a run of train.py as it is, without the tests' checks of types."""
    text = folder / "text"
    text.write_bytes(bytes(range(256)) * 80)
    arguments = [
        *(a for a in SMALLER if a != "stage=all"),
        "stage=1",
        f"data.path={text}",
        f"runs_dir={folder / str(compiled)}",
        f"schedule.stages.1={STAGES['1']}",
        "trainer.precision=32-true",
        "trainer.log_every=1",
        f"trainer.compile={compiled}",
    ]
    subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    (checkpoint,) = (folder / str(compiled)).glob("*/stage1/checkpoints/last.ckpt")
    return load_checkpoint(checkpoint)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler, g++")
def test_it_changes_nothing_but_rounding(tmp_path: Path) -> None:
    plain = train(tmp_path, False)
    assert not list((tmp_path / "compiled").rglob("*.so"))
    compiled = train(tmp_path, True)
    assert list((tmp_path / "compiled").rglob("*.so"))
    assert compiled["bpc"] == pytest.approx(plain["bpc"], rel=1e-5)
    for name, weight in plain["weights"].items():
        difference = (compiled["weights"][name] - weight).abs().max()
        assert difference < 1e-5, name


@pytest.mark.slow
def test_every_stage_is_compiled(tmp_path: Path) -> None:
    arguments = ["debug=smoke", "stage=all", "trainer.compile=true", "trainer.accelerator=cpu"]
    done = subprocess.run(
        [sys.executable, "train.py", *arguments, f"runs_dir={tmp_path}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "recompile_limit" not in done.stdout + done.stderr
    assert done.stdout.count("val ") == 5


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "", '"g++'])
def test_a_compiler_that_does_not_run_is_named(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(UserError, match=re.escape(f"and {compiler!r} does not run")):
        check_compiler("cpu")
    check_compiler("cuda")


def full(**place: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_for_compiled_programs_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(UserError, match="TORCHINDUCTOR_CACHE_DIR=.*folder: Not a directory"):
        check_compiler("cuda")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    check_compiler("cuda")
    monkeypatch.setattr("lm.model.compilation.TemporaryFile", full)
    with pytest.raises(UserError, match="TORCHINDUCTOR_CACHE_DIR=.*new: No space left"):
        check_compiler("cuda")
