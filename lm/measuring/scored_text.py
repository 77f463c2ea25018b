"""The corpus that a model is measured on, and the bytes of it that are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.corpus import SPLITS, Corpus, Split
from lm.config.command_schemas import EvalConfig
from lm.errors import ConfigError
from lm.inference.trained_model import Source
from lm.measuring.protocols import targets_of


@dataclass(frozen=True)
class Selection:
    """The bytes that are read: `context` of the preceding split, then those of `split`."""

    split: Split
    text: np.ndarray
    context: int

    @property
    def targets(self) -> int:
        """How many characters could be scored."""
        return targets_of(len(self.text), self.context)


def corpus_difference(source: Source, corpus: Corpus) -> str:
    """How the corpus differs from the one that the model was trained on; empty if it does not.

    Raises:
        ConfigError: if it has the same name but other bytes: then a number would be quoted as
            one that it is not. A file of one's own may have any bytes.
    """
    trained = source.checkpoint["data"]
    if corpus.name != trained["name"]:
        return (
            f"ANOTHER CORPUS: the model was trained on {trained['name']}, this is {corpus.name}; "
            "the number compares with no published one"
        )
    for name, split in corpus.splits.items():
        then = trained["sha256"].get(name)
        if then == split.sha256:
            continue
        text = (
            f"{name} split of {split.path} has sha256 {split.sha256}, "
            f"the model was trained beside {then}"
        )
        if corpus.name == "file":
            return f"ANOTHER CORPUS: {text}"
        raise ConfigError(
            f"data.name={corpus.name}: {text}; give data.root or the data of the training run, "
            "or evaluate this text by its path, data.path=PATH"
        )
    return ""


def select(corpus: Corpus, config: EvalConfig, field: int) -> Selection:
    """The bytes to read; of the preceding split no more than anything can see.

    Raises:
        ConfigError: if there is nothing to score.
    """
    split = corpus.splits[config.split]
    if config.context == "none":
        text = split.read()
        text = text if config.max_chars is None else text[: config.max_chars + 1]
        if len(text) < 2:
            raise ConfigError(
                f"split={config.split}: {split.path} has {len(split)} byte in this split; scoring "
                "needs at least 2 with context=none, since nothing predicts the first"
            )
        return Selection(split, text, 0)
    previous = corpus.splits[SPLITS[SPLITS.index(config.split) - 1]].read()
    before = previous[-max(field, config.window) :]
    text = split.read()[: config.max_chars]
    return Selection(split, np.concatenate([before, text]), len(before))
