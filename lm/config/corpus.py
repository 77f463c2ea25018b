"""The corpus that a configuration names: where it lies, and opening it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from platformdirs import user_cache_path

from data.corpus import Corpus, open_corpus
from data.store import absolute
from lm.config.schema import DataConfig
from lm.errors import ConfigError


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """The same, so that it can be read in another folder than the one where it was typed."""
    changed = replace(data)
    for name in ("root", "path", "train_path", "valid_path", "test_path"):
        if place := getattr(data, name):
            setattr(changed, name, str(absolute(place)))
    return changed


def corpus_of(data: DataConfig) -> Corpus:
    """Open the corpus of a configuration."""
    return open_corpus(
        data.name,
        data_root(data),
        path=data.path,
        train_path=data.train_path,
        valid_path=data.valid_path,
        test_path=data.test_path,
        fractions=data.fractions,
        allow_nonstandard=data.allow_nonstandard,
    )


def data_root(config: DataConfig) -> Path:
    """The folder of enwik8 and text8: the key, $LONGCHAR_DATA, or the user's cache folder.

    Raises:
        ConfigError: if nothing is set and this user has no home folder.
    """
    if chosen := config.root or os.environ.get("LONGCHAR_DATA", ""):
        return Path(chosen)
    try:
        return user_cache_path("longchar") / "data"
    except RuntimeError as error:
        raise ConfigError(
            "data.root: found no value, no LONGCHAR_DATA and no home folder to keep texts in; "
            "set data.root=FOLDER"
        ) from error
