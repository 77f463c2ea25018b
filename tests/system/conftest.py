"""Shared by the tests of whole runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lm.machine.device
import lm.model.checkpoint
import lm.training.saving
from lm.training.run import train
from tests.system.micro import micro, outcome, state
from tests.system.moments import Moments
from tests.system.trial import Nursery


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs do not measure the device first."""
    monkeypatch.setattr(lm.machine.device, "matrix_rate", lambda *_, **__: 1e11)


class Reference:
    """A run that nothing disturbs.

    Attributes:
        folder: where it ran.
        outcome: what it leaves.
        moments: how many moments it has.
        steps: every state at a step border, by stage and step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: dict[tuple[int, int], dict[str, Any]] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lm.machine.device, "matrix_rate", lambda *_, **__: 1e11)
            with Moments() as moments:
                train(micro(folder))
            self.moments = moments.count
            self.outcome = outcome(micro(folder))
            save = lm.training.saving.save_checkpoint

            def note(path: Path, content: dict[str, Any], keep: Path | None = None) -> None:
                if path.name == "last.ckpt":
                    self.steps[content["stage"]["number"], content["step"]] = state(content)
                save(path, content, keep)

            patch.setattr(lm.training.saving, "save_checkpoint", note)
            train(micro(folder, {"name": "each", "trainer.save_every": 1}))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The run that disturbed ones have to repeat."""
    return Reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks runs."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Train the micro run in the test's folder, with other values by dotted key."""
    return lambda **changed: train(
        micro(tmp_path, {key.replace("__", "."): value for key, value in changed.items()})
    )
