"""eval.py from its configuration to what it prints and keeps."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.corpus import DataError
from lm.config.command_schemas import CurvesConfig, DataOverride, EvalConfig
from lm.config.schema import ConfigError
from lm.measuring.evaluation import evaluate_command
from lm.measuring.protocols import stream
from tests.lm.evaluation_cases import FIELD, random_text, save_run, tiny_model, uniform_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with a run named x on 4,000 characters."""
    save_run(tmp_path, tiny_model(), random_text(4000))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_line_has_everything_to_quote(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = evaluate_command(EvalConfig(run="x"))
    line = last_line(capsys)
    assert line == record
    text = random_text(4000)[3800:]
    expected = {
        "bpc": pytest.approx(stream(tiny_model(), text).bpc, abs=1e-6),
        "unit": "bits per byte",
        "characters": 199,
        "protocol": "stream",
        "window": None,
        "step": None,
        "context": "none",
        "newlines": "all",
        "split": "test",
        "split_bytes": [3800, 4000],
        "scored_bytes": [3801, 4000],
        "run": "x",
        "stage": 1,
        "training_step": 10,
        "receptive_field": FIELD,
        "precision": "32-true",
        "backend": "dense",
        "processes": 1,
        "data": "file",
        "trained_on": "file",
    }
    assert {key: line[key] for key in expected} == expected
    assert {"split_sha256", "model_sha256", "checkpoint", "parameters", "seconds"} <= line.keys()
    kept = list((home / "runs" / "x" / "results").glob("*.json"))
    assert [json.loads(path.read_text()) for path in kept] == [record]


def test_options_do_what_they_say(home: Path) -> None:
    text = random_text(4000)
    model = tiny_model()
    previous = evaluate_command(EvalConfig(run="x", context="previous"))
    assert previous["characters"] == 200
    assert previous["scored_bytes"] == [3800, 4000]
    expected = stream(model, text[3600:], context=200)
    assert previous["bpc"] == pytest.approx(expected.bpc, abs=1e-6)

    skipped = evaluate_command(EvalConfig(run="x", newlines="skip"))
    newlines = int((text[3801:] == ord("\n")).sum())
    assert 0 < skipped["newlines_left_out"] == newlines == 199 - skipped["characters"]
    assert any("newlines" in note for note in skipped["notes"])

    valid = evaluate_command(EvalConfig(run="x", split="valid", max_chars=50))
    assert (valid["characters"], valid["scored_bytes"]) == (50, [3601, 3651])
    # What validation while training computes for validation.characters=50.
    assert valid["bpc"] == pytest.approx(stream(model, text[3600:3800][:51]).bpc, abs=1e-9)

    paper = evaluate_command(EvalConfig(run="x", protocol="paper", window=64, step=16))
    full = (199 - 64) // 16 + 1
    assert (paper["characters"], paper["characters_left_out"]) == (full * 16, 199 - full * 16)
    assert paper["min_context"] == 49
    assert len(list((home / "runs" / "x" / "results").glob("*.json"))) == 4


def test_overlap_where_the_field_fits_points_to_stream(home: Path) -> None:
    fits = evaluate_command(EvalConfig(run="x", protocol="overlap", window=FIELD + 8, step=8))
    assert fits["bpc"] == pytest.approx(evaluate_command(EvalConfig(run="x"))["bpc"], abs=1e-6)
    assert "protocol=stream gives the same" in " ".join(fits["notes"])
    cut = evaluate_command(EvalConfig(run="x", protocol="overlap", window=FIELD + 7, step=8))
    assert "protocol=stream" not in " ".join(cut["notes"])


def test_uniform_model_prints_eight(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm.schedule import Stage

    stage = Stage(1, 64, (5,), ((1, 2),), 1e-3, 4, 10, 1)
    path = save_run(tmp_path, uniform_model(), random_text(1000), name="flat", stage=stage)
    evaluate_command(EvalConfig(ckpt=str(path)))
    out = capsys.readouterr().out
    assert "8.000000 bits per character (byte)" in out
    assert "not kept" in out


def test_curves_are_written_and_add_up(home: Path) -> None:
    curves = CurvesConfig(contexts=[1, 4, 16, 64, 100], blocks=5, block=10)
    record = evaluate_command(
        EvalConfig(run="x", protocol="overlap", window=48, step=48, curves=curves)
    )
    folder = home / "runs" / "x" / "results"
    tables = {}
    for name in ("position", "context"):
        (path,) = folder.glob(f"*-{name}.csv")
        tables[name] = rows_of(path)
        (picture,) = folder.glob(f"*-{name}.png")
        assert picture.read_bytes().startswith(b"\x89PNG")
    position = tables["position"]
    counts = np.array([int(row["characters"]) for row in position])
    bpc = np.array([float(row["bpc"]) for row in position])
    assert counts.sum() == record["characters"]
    assert (counts * bpc).sum() / counts.sum() == pytest.approx(record["bpc"], abs=1e-5)
    assert int(position[0]["context_from"]) == 1
    contexts = tables["context"]
    assert [int(row["context_from"]) for row in contexts] == curves.contexts
    assert {row["characters"] for row in contexts} == {"50"}
    # Beyond the receptive field more context changes nothing; within it, it does.
    assert contexts[3]["bpc"] == contexts[4]["bpc"] != contexts[2]["bpc"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 0}, r"step=0 with window=32256: step must be 1 to window"),
        ({"step": 65, "window": 64}, r"step=65 with window=64"),
        ({"window": 0}, r"window=0: expected at least 1"),
        ({"split": "train", "context": "previous"}, r"context=previous with split=train"),
        ({"protocol": "both"}, r"protocol=both: expected one of stream, overlap, paper"),
        ({"newlines": "no"}, r"newlines=no"),
        ({"max_chars": 0}, r"max_chars=0"),
        ({"batch": 0}, r"batch=0"),
        ({"ckpt": "a.ckpt"}, r"found run=x and ckpt=a.ckpt"),
        ({"run": ""}, r"found neither; give run=NAME or ckpt=PATH"),
        ({"run": "", "ckpt": "a.ckpt"}, r"a.ckpt: no such checkpoint"),
        ({"run": "y"}, r"run=y: no stage found in runs/y; in runs there are x"),
        ({"stage": 2}, r"run=x, stage=2: not a finished stage \(found stage 1 at step 10 of 10\)"),
        ({"protocol": "paper"}, r"no character was scored: with window=32256"),
        ({"curves": CurvesConfig(contexts=[500])}, r"curves.contexts=\[500\]: .* the text has 200"),
    ],
)
def test_what_cannot_be_is_refused(home: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        evaluate_command(EvalConfig(**({"run": "x"} | changes)))  # type: ignore[arg-type]
    assert type(caught.value).__name__ in ("ConfigError", "CheckpointError", "UserError")


def test_short_files(home: Path) -> None:
    for size in range(4):
        for split in ("train", "valid", "test"):
            (home / f"{split}{size}").write_bytes(b"abc"[:size])
        config = EvalConfig(
            run="x",
            data=DataOverride(
                train_path=f"train{size}", valid_path=f"valid{size}", test_path=f"test{size}"
            ),
        )
        if size == 0:
            with pytest.raises(DataError, match="empty"):
                evaluate_command(config)
        elif size == 1:
            with pytest.raises(ConfigError, match="at least 2 with context=none"):
                evaluate_command(config)
        else:
            assert evaluate_command(config)["characters"] == size - 1
            assert (
                evaluate_command(EvalConfig(run="x", protocol="overlap", data=config.data))[
                    "characters"
                ]
                == size - 1
            )


def test_another_corpus_is_said_and_a_changed_one_refused(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "other.txt").write_bytes(random_text(3000, seed=5).tobytes())
    record = evaluate_command(EvalConfig(run="x", data=DataOverride(path="other.txt")))
    assert any(note.startswith("ANOTHER CORPUS") for note in record["notes"])
    assert "note: ANOTHER CORPUS" in capsys.readouterr().out

    from lm.config import corpus

    monkeypatch.setattr(corpus, "open_corpus", renamed(corpus.open_corpus, "stdlib"))
    record = evaluate_command(EvalConfig(run="x"))
    assert "the model was trained on file, this is stdlib" in record["notes"][0]


def renamed(open_corpus: object, name: str):
    import dataclasses

    def opened(*args: object, **options: object):
        return dataclasses.replace(open_corpus(*args, **options), name=name)  # type: ignore[operator]

    return opened


def test_other_bytes_under_the_same_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm.config import corpus

    path = save_run(tmp_path, tiny_model(), random_text(3000))
    monkeypatch.setattr(corpus, "open_corpus", renamed(corpus.open_corpus, "enwik8"))
    from lm.measuring import evaluation as measure

    source = measure.open_source(EvalConfig(ckpt=str(path)))
    source.checkpoint["data"]["name"] = "enwik8"
    (tmp_path / "x.txt").write_bytes(random_text(3000, seed=1).tobytes())
    monkeypatch.setattr(measure, "open_source", lambda config: source)
    with pytest.raises(ConfigError, match=r"data.name=enwik8: train split .* has sha256"):
        evaluate_command(EvalConfig(ckpt=str(path)))


def test_the_highest_finished_stage_is_taken(tmp_path: Path) -> None:
    from dataclasses import replace

    from lm.inference.trained_model import best_checkpoint
    from tests.lm.evaluation_cases import STAGE

    text = random_text(1000)
    for number, finished in ((1, True), (2, True), (3, False)):
        save_run(
            tmp_path,
            tiny_model(),
            text,
            stage=replace(STAGE, number=number),
            finished=finished,
        )
    folder = tmp_path / "runs" / "x"
    assert best_checkpoint(folder) == folder / "stage2" / "checkpoints" / "best.ckpt"
    assert best_checkpoint(folder, 1) == folder / "stage1" / "checkpoints" / "best.ckpt"
    with pytest.raises(ConfigError, match=r"stage=3: .* stage 3 at step 9 of 10"):
        best_checkpoint(folder, 3)


def test_two_processes_from_an_empty_folder(tmp_path: Path, home: Path) -> None:
    """The command by itself: one line of JSON, the same number as one process gives."""
    empty = tmp_path / "empty"
    empty.mkdir()
    checkpoint = home / "runs" / "x" / "stage1" / "checkpoints" / "best.ckpt"
    command = [
        sys.executable, str(ROOT / "eval.py"), f"ckpt={checkpoint}", "protocol=stream",
        "trainer.devices=2", "trainer.accelerator=cpu", "newlines=skip", "chunk=16",
        "curves.contexts=[8,64]", "curves.blocks=4", "results=kept",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=empty, capture_output=True, text=True, check=False,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout.splitlines()[-1])
    one = evaluate_command(
        EvalConfig(
            ckpt=str(checkpoint),
            newlines="skip",
            curves=CurvesConfig(contexts=[8, 64], blocks=4),
            results="kept",
        )
    )
    assert two["processes"] == 2
    for key in ("characters", "newlines_left_out", "split_sha256", "model_sha256"):
        assert two[key] == one[key]
    assert two["bpc"] == pytest.approx(one["bpc"], abs=1e-6)
    for name in ("position", "context"):
        (here,), (there,) = (
            Path("kept").glob(f"*-{name}.csv"),
            (empty / "kept").glob(f"*-{name}.csv"),
        )
        for a, b in zip(rows_of(here), rows_of(there), strict=True):
            assert a["characters"] == b["characters"]
            assert float(a["bpc"]) == pytest.approx(float(b["bpc"]), abs=2e-6)
