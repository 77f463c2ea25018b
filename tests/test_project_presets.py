"""Every choice in conf/ composes, fits the schema, and passes the checks of its command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from lm.config.checks import check_train, schedule_of
from lm.config.command_schemas import (
    CompressConfig,
    EvalConfig,
    SampleConfig,
    check_compress,
    check_eval,
    check_sample,
)
from lm.config.schema import Config, to_config

CONF = Path(__file__).resolve().parent.parent / "conf"
CHOICES = [
    f"{group.name}={file.stem}"
    for group in sorted(CONF.iterdir())
    if group.is_dir()
    for file in sorted(group.glob("*.yaml"))
]
# What each command's check takes, and the least that has to be said on its command line.
COMMANDS = {
    "train": (Config, check_train, []),
    "eval": (EvalConfig, check_eval, ["run=demo"]),
    "sample": (SampleConfig, check_sample, ["run=demo"]),
    "compress": (
        CompressConfig,
        check_compress,
        ["action=compress", "run=demo", "input=a", "output=b"],
    ),
}


def config_of(command: str, schema: type, *overrides: str):
    ConfigStore.instance().store(name=f"{command}_schema", node=schema)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_config(compose(command, list(overrides)), schema)
    assert isinstance(config, schema)
    return config


def train_config(*overrides: str) -> Config:
    return config_of("train", Config, *overrides)


@pytest.mark.parametrize("command", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_command(command):
    schema, check, overrides = COMMANDS[command]
    check(config_of(command, schema, *overrides))
    assert (CONF.parent / f"{command}.py").exists()


@pytest.mark.parametrize("choice", CHOICES)
def test_choice(choice):
    overrides = [choice]
    if choice == "model=large":
        overrides.append("schedule=longformer_large")
    config = train_config(*overrides)
    check_train(config)
    for stage in range(1, len(schedule_of(config)) + 1):
        check_train(replace(config, stage=str(stage)))


@pytest.mark.parametrize("choice", [c for c in CHOICES if c.startswith("experiment=")])
def test_experiment_is_named_after_itself(choice):
    assert train_config(choice).name == choice.removeprefix("experiment=")


def test_experiments_of_the_paper_and_for_small_machines_are_there():
    names = {path.stem for path in (CONF / "experiment").glob("*.yaml")}
    assert {
        "enwik8_small",
        "enwik8_large",
        "text8_small",
        "text8_large",
        "enwik8_tiny",
        "demo",
    } <= names
