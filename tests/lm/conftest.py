"""Shared by the tests of lm."""

from collections.abc import Callable

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore

from lm.config.command_line import CONF
from lm.config.schema import Config, to_config


@pytest.fixture
def compose() -> Callable[..., Config]:
    """The typed configuration that train.py would get from these arguments."""

    def compose(*overrides: str) -> Config:
        ConfigStore.instance().store(name="train_schema", node=Config)
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = to_config(hydra_compose("train", list(overrides)), Config)
        assert isinstance(config, Config)
        return config

    return compose
