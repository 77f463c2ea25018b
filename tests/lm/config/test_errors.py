"""Mistakes in keys and values end in one line that names the key."""

import subprocess
import sys
from pathlib import Path

import pytest

from lm.config.checks import check_train
from lm.config.command_line import command, in_order, nearest_key
from lm.config.command_schemas import CompressConfig, EvalConfig, SampleConfig
from lm.config.schema import Config, ConfigError
from lm.training.run import train

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.heads=7", "model.heads=7: must divide model.width=512"),
        ("model.layers=0", "model.layers=0: expected at least 1"),
        ("model.dropout=1", "model.dropout=1.0: expected at least 0 and less than 1"),
        ("model.dropout=nan", "model.dropout=nan: expected at least 0"),
        ("model.backend=cuda", "model.backend=cuda: expected one of auto, tvm"),
        ("model.position_unit=x", "model.position_unit=x: expected one of characters"),
        ("data.name=wiki", "data.name=wiki: expected one of enwik8"),
        ("trainer.devices=0", "trainer.devices=0: expected at least 1"),
        ("trainer.precision=half", "trainer.precision=half: expected one of auto"),
        ("trainer.micro_batch=0", "trainer.micro_batch=0: expected at least 1"),
        ("validation.every=0", "validation.every=0: expected at least 1"),
        ("optim.clip=-1", "optim.clip=-1.0: expected at least 0"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: expected two numbers"),
        ("data.fractions=[0.5,0.5]", "data.fractions=[0.5, 0.5]: expected three numbers"),
        ("name=a/b", "name='a/b': expected the name of a folder"),
        ("name=..", "name='..': expected the name of a folder"),
        ("seed=-1", "seed=-1: expected at least 0"),
        ("seed=18446744073709551616", "seed=18446744073709551616: expected at most"),
        (f"name={'x' * 201}", "name=xxxxxxxxxxxxxxxxxxxx...: has 201 bytes"),
        ("optim.eps=0", "optim.eps=0.0: expected more than 0"),
        ("trainer.threads=100000", "trainer.threads=100000: expected at most 1024"),
        ("schedule.stages.1.windows=[9999999999]", "schedule.stages.1.windows=9999999999: exp"),
        ("schedule.stages.2.batch=100000000000", "schedule.stages.2.batch=100000000000: exp"),
    ],
)
def test_values_out_of_range_are_named(override, message, compose):
    with pytest.raises(ConfigError) as caught:
        check_train(compose(override))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("trainer.devicse", "did you mean trainer.devices?"),
        ("model.layer", "did you mean model.layers?"),
        ("schedule.stages.3.sequenc", "did you mean schedule.stages.3.sequence?"),
        (
            "schedule.stages.6",
            "schedule.stages has one entry for each stage of the schedule; --cfg job shows them",
        ),
        ("optim.lr", "did you mean schedule.stages.<number>.lr?"),
        ("optim.x", "optim has betas, eps, weight_decay, decay, clip, fresh, max_bad_steps"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_one(key, hint):
    assert nearest_key(key, Config) == hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.devicse=2"], "trainer.devicse: unknown key; did you mean trainer.devices?"),
        (["+model.size=2"], "model.size: unknown key; --cfg job shows the keys that there are"),
        (["model.layers=many"], "model.layers: Value 'many' of type 'str' could not be converted"),
        (["experiment=enwik9"], "experiment=enwik9: no such choice; expected one of demo,"),
        (["model=[small,large]"], "model=[small,large]: expected one choice; -m with model=A,B"),
        (["model=small,large"], "model=small,large: expected one choice; -m with model=A,B"),
        (["-m", "runs_dir=/dev/null", "seed=1,2"], "runs_dir=/dev/null: File exists; a sweep"),
        (["-m", "--cfg", "job", "seed=1,2"], "--multirun, --cfg: each is a task of its own"),
        (["--cfg", "job", "-r"], "--run, --cfg: each is a task of its own; give one of them"),
        (["-sc"], "--shell-completion: expected install=bash"),
        (["--experimental-rerun", ""], "--experimental-rerun: it would run"),
        (["debug=smok"], "debug=smok: no such choice; expected one of"),
        (["=3"], "=3: expected key=value"),
        (["seed", "=", "3"], "seed: expected key=value, without blanks around the =;"),
        (["--ckpt", "x"], "--ckpt: unknown option; values are given as key=value, without dashes"),
        (
            ["--config-name", "eval"],
            "--config-name, --config-path: a command has one configuration",
        ),
        (
            ["--config-path", "/tmp"],
            "--config-name, --config-path: a command has one configuration",
        ),
        (["--experimental-rerun", "x"], "--experimental-rerun: it would run whatever the file"),
        (["--resolve"], "--resolve: it goes with --cfg job"),
        (["--cfg", "x"], "argument --cfg/-c: invalid choice: 'x'"),
        (["seed=${nothing}"], "seed: Interpolation key 'nothing' not found"),
        (["stage=null"], "stage: found null, expected a value"),
        (["stage=[1,2]"], "stage: list found, expected a text; quote it if it is one"),
        (["data.fractions=1"], "data.fractions: int found, expected a list as in [1,2]"),
        (["+schedule.stages.9={lr:1}"], "+schedule.stages.9: dict found, expected StageTable"),
        (
            ['data.path=a"b'],
            'data.path=a"b: a value with =, commas or other signs has to be quoted'
            ' twice, once for the shell: \'data.path="a\\"b"\'',
        ),
        (["runs_dir=/dev/null"], "runs_dir=/dev/null: /dev/null is a file, expected a folder"),
        (
            ["init_from=none.ckpt"],
            "init_from=none.ckpt: no such checkpoint file; expected the path",
        ),
        (["data.path=a"], "data.path: only for data=file, not for data=enwik8"),
        (["data.path=a=b"], "data.path=a=b: a value with =, commas or other signs has to be"),
        (["data.path=a,b"], "data.path=a,b: a value with =, commas or other signs has to be"),
        (["stage=6"], "stage=6: this schedule has the stages 1 to 5"),
        (["trainer.precision=16-mixed", "trainer.accelerator=cpu"], "trainer.precision=16-mixed:"),
        (["trainer.devices=3"], "trainer.devices=3, trainer.nodes=1: 3 processes cannot share"),
        (["trainer.micro_batch=5"], "trainer.micro_batch=5: must divide 32"),
        (["data=file", "data.path=/no/such/file"], "data.path: cannot read /no/such/file: No"),
    ],
)
def test_the_command_line_ends_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        command("train", Config)(train)()
    assert isinstance(caught.value.code, str)
    assert caught.value.code.startswith(f"error: {message}")
    assert "\n" not in caught.value.code
    assert not list(tmp_path.iterdir())


def test_options_may_stand_anywhere():
    typed = ["stage=1", "--cfg", "job", "seed=1", "--resolve", "name=x"]
    ordered = ["stage=1", "seed=1", "name=x", "--cfg", "job", "--resolve"]
    assert in_order(typed, Config) == ordered
    assert in_order(["stage=1", "-m", "seed=1,2"], Config) == ["stage=1", "seed=1,2", "-m"]
    assert in_order(["stage=1", "--hydra-help"], Config) == ["--hydra-help"]


@pytest.mark.parametrize("name", ["train", "eval", "sample", "compress"])
def test_help_begins_with_the_command(name, monkeypatch, capsys):
    schema = {"train": Config, "eval": EvalConfig, "sample": SampleConfig}
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        command(name, schema.get(name, CompressConfig))(lambda config: None)()
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith(f"python {name}.py ")
    assert "README.md shows the commands" in last


def test_the_program_itself_says_one_line_and_fails(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "train.py", "stage=6"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr == (
        "error: stage=6: this schedule has the stages 1 to 5; choose one of them, or stage=all\n"
    )
    assert not list(tmp_path.iterdir())
