"""Where a run begins: what is refused, what is left alone, what is used instead."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.config.command_schemas import DataOverride, merged_data
from lm.config.corpus import corpus_of
from lm.config.schema import ConfigError, UserError
from lm.machine.cluster import Seat
from lm.model.checkpoint import CheckpointError, load_checkpoint
from lm.training.processes import Team
from lm.training.run import locked
from tests.system.conftest import Reference
from tests.system.micro import micro, outcome, plain

Run = Callable[..., None]


@pytest.fixture
def begun(tmp_path: Path, reference: Reference) -> Path:
    """The folder of a finished stage 1."""
    stage = Path("runs") / "micro" / "stage1"
    shutil.copytree(reference.folder / stage, tmp_path / stage)
    return tmp_path / stage


def test_a_later_stage_needs_the_one_before(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        run(stage="2")
    text = str(error.value)
    assert text.startswith("stage=2 begins from stage 1's best weights, and ")
    assert "make them with: python train.py name=micro stage=1" in text
    assert not (tmp_path / "runs").exists()


def test_a_later_stage_needs_the_one_before_to_be_finished(run: Run, begun: Path) -> None:
    checkpoints = begun / "checkpoints"
    (checkpoints / "previous.ckpt").replace(checkpoints / "last.ckpt")
    with pytest.raises(UserError, match="stage 1 is at step 6 of 7; go on with"):
        run(stage="2")


def test_stages_one_by_one_are_the_same_as_all(
    run: Run, begun: Path, tmp_path: Path, reference: Reference
) -> None:
    run(stage="2")
    assert outcome(micro(tmp_path)) == reference.outcome


def test_the_next_stage_begins_with_the_best_weights_its_own_rate_and_no_state(
    run: Run, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm.training.module import TrainingModule

    found = []
    monkeypatch.setattr(
        TrainingModule,
        "on_train_start",
        lambda self: found.append((plain(self.model.state_dict()), len(self.optimizers().state))),
    )
    run(stage="2")
    weights, states = found[0]
    assert states == 0
    assert weights == plain(load_checkpoint(begun / "checkpoints" / "best.ckpt")["weights"])
    first = (begun.parent / "stage2" / "metrics.csv").read_text().splitlines()[1].split(",")
    assert float(first[5]) == 5e-3 and int(first[0]) == 2


def test_optimiser_state_is_handed_over_if_asked(run: Run, tmp_path: Path) -> None:
    run(optim__fresh=False, schedule__stages__1__steps=2, schedule__stages__2__steps=2)
    one, two = (
        load_checkpoint(tmp_path / "runs" / "micro" / name)["optimizer"]["state"][0]["step"]
        for name in ("stage1/checkpoints/best.ckpt", "stage2/checkpoints/last.ckpt")
    )
    assert (float(one), float(two)) == (2, 4)


def test_it_cannot_be_handed_over_where_there_is_none(run: Run, begun: Path) -> None:
    with pytest.raises(UserError, match="optim.fresh=false: the checkpoint .* has no optimiser"):
        run(stage="2", optim__fresh=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 2, "seed=1, now 2"),
        ("schedule__stages__1__lr", 2e-2, "stage.lr=0.01, now 0.02"),
        ("schedule__stages__1__sequence", 16, "stage.sequence=32, now 16"),
        ("schedule__stages__1__steps", 9, "stage.steps=7, now 9"),
        ("schedule__stages__1__windows", [4, 8], r"stage.windows=\[3, 8\], now \[4, 8\]"),
        ("model__dropout", 0.3, "model.dropout=0.2, now 0.3"),
        ("model__width", 16, "model.width=32, now 16"),
        ("optim__clip", 1.0, "optim.clip=0.25, now 1.0"),
        ("data__fractions", [0.8, 0.1, 0.1], "data.sha256.test="),
    ],
)
def test_another_run_does_not_go_on_in_the_same_folder(
    key: str, value: object, message: str, run: Run, begun: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("*")}
    with pytest.raises(UserError, match=f"stage1 was begun with {message}") as error:
        run(stage="1", **{key: value})
    assert "another name=, or overwrite=true" in str(error.value)
    assert before == {path: path.stat().st_mtime_ns for path in begun.rglob("*")}


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_text_that_was_damaged_since_is_noticed(
    damage: str, run: Run, begun: Path, tmp_path: Path
) -> None:
    text = Path(micro(tmp_path).data.path)
    whole = bytearray(text.read_bytes())
    whole[len(whole) // 2] ^= 1
    text.write_bytes({"cut": whole[:15_000], "flip": whole}[damage])
    with pytest.raises(UserError, match=r"stage1 was begun with data\.sha256\.\w+="):
        run(stage="1")


def test_what_may_change_may_change(run: Run, begun: Path) -> None:
    run(stage="1", model__backend="loop", trainer__micro_batch=1, trainer__save_every=5)


def test_overwrite_starts_again(run: Run, begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (begun / "plots").mkdir()
    run(stage="1", seed=2, overwrite=True)
    assert load_checkpoint(begun / "checkpoints" / "last.ckpt")["config"]["seed"] == 2
    assert not (begun / "plots").exists()


def test_nothing_is_deleted_for_a_run_that_cannot_begin(run: Run, begun: Path) -> None:
    with pytest.raises(UserError, match="init_from=none.ckpt: no such checkpoint"):
        run(stage="1", overwrite=True, init_from="none.ckpt")
    assert (begun / "checkpoints" / "last.ckpt").exists()


def test_trial_runs_stay_among_themselves(run: Run, begun: Path, tmp_path: Path) -> None:
    run(stage="all", throwaway=True, init_from="scratch")
    trial = begun.parent / "trial"
    assert {path.name for path in trial.iterdir()} == {".lock", "stage1", "stage2"}
    second = load_checkpoint(trial / "stage2" / "checkpoints" / "last.ckpt")
    run(stage="all", throwaway=True, init_from="scratch")
    again = load_checkpoint(trial / "stage2" / "checkpoints" / "last.ckpt")
    assert plain(again["weights"]) == plain(second["weights"])
    assert not (begun.parent / "stage2").exists()


def test_weights_of_another_run_are_taken_over(run: Run, begun: Path) -> None:
    path = begun / "checkpoints" / "best.ckpt"
    run(name="other", stage="all", init_from=str(path), schedule__stages__1__steps=1)
    with pytest.raises(UserError, match="holds a model with model.heads=2, this run has 4"):
        run(name="third", stage="1", init_from=str(path), model__heads=4)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_last_checkpoint_is_named_and_the_one_before_is_used(
    damage: str,
    run: Run,
    begun: Path,
    tmp_path: Path,
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoints = begun / "checkpoints"
    last = checkpoints / "last.ckpt"
    whole = bytearray(last.read_bytes())
    whole[len(whole) // 2] ^= 1
    last.write_bytes({"cut": whole[:9999], "flip": whole, "empty": b"", "text": b"text"}[damage])
    capsys.readouterr()
    run()
    said = capsys.readouterr().err
    assert said == f"warning: {last} is damaged; going on from {checkpoints / 'previous.ckpt'}\n"
    assert outcome(micro(tmp_path)) == reference.outcome
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"best.ckpt", "last.ckpt", "previous.ckpt", "last.damaged"}
    assert load_checkpoint(checkpoints / "previous.ckpt")["step"] == 6


def test_two_damaged_checkpoints_are_an_error(run: Run, begun: Path) -> None:
    for name in ("last.ckpt", "previous.ckpt"):
        (begun / "checkpoints" / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last.ckpt: truncated.*previous.ckpt: truncated"):
        run(stage="1")


def test_a_checkpoint_of_another_format_is_not_taken_for_damage(run: Run, begun: Path) -> None:
    import torch

    path = begun / "checkpoints" / "last.ckpt"
    torch.save({"format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        run(stage="1")
    assert path.exists()


def test_what_killed_runs_left_is_cleared_away(run: Run, begun: Path) -> None:
    strays = [
        begun / "checkpoints" / ".last.ckpt.123.unfinished",
        begun / ".state.json.123.unfinished",
    ]
    for stray in strays:
        stray.write_bytes(b"half")
    (begun / "state.json").write_text('{"step": 6, "steps": 7, "finished": false}')
    run(stage="1")
    assert not any(stray.exists() for stray in strays)
    assert '"finished": true' in (begun / "state.json").read_text()


def test_a_second_run_in_the_same_folder_is_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "micro"
    holder = (
        "import sys; from filelock import FileLock\n"
        f"with FileLock({str(folder / '.lock')!r}): print('held', flush=True); sys.stdin.read()"
    )
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="micro: another run is using this folder; wait"):
            run(stage="1")
        assert not (folder / "stage1").exists()
        other.kill()
    run(stage="1", schedule__stages__1__steps=1)  # the lock of a killed process is free


def test_a_refused_run_leaves_the_lock_to_the_next(run: Run, begun: Path) -> None:
    with pytest.raises(UserError):
        run(stage="1", seed=5)
    with locked(begun.parent, Team(Seat())):
        pass


def test_the_text_is_found_from_another_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro(tmp_path)
    monkeypatch.chdir(tmp_path)
    run(stage="1", data__path="text", schedule__stages__1__steps=1)
    monkeypatch.chdir("/")
    path = tmp_path / "runs" / "micro" / "stage1" / "checkpoints" / "best.ckpt"
    recorded = load_checkpoint(path)["config"]["data"]
    assert recorded["path"] == str(tmp_path / "text") and recorded["root"] == ""
    assert len(corpus_of(merged_data(recorded, DataOverride())).splits["test"]) == 1000


def test_one_checkpoint_more_than_the_disk_holds(
    run: Run, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(ConfigError, match="has room for 0 MB, the checkpoints of stage 1 need 1"):
        run(name="new", stage="1")
    assert not (tmp_path / "runs" / "new").exists()
    with pytest.raises(ConfigError, match="has room for 0 MB"):
        run(stage="1", overwrite=True)
    assert (begun / "checkpoints" / "last.ckpt").exists()
