"""The configuration of train.py for commands that only look at it, not train from it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lm.config.checks import check_train
from lm.config.command_line import CONF, explain
from lm.config.schema import Config, to_config


def train_config(overrides: Sequence[str]) -> Config:
    """What `python train.py` would get from these arguments, checked.

    Raises:
        UserError: for a value that cannot be used. SystemExit: for an argument Hydra refuses.
    """
    ConfigStore.instance().store(name="train_schema", node=Config)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = to_config(compose("train", list(overrides)), Config)
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {explain(error, Config)}")
    assert isinstance(config, Config)
    check_train(config)
    return config
