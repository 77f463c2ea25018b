"""What the tests of the backends share."""

from typing import Any

import pytest
import torch

from tests.kernels.tester import BACKENDS, types_of


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that can run here; the others skip with their reason."""
    types_of(request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, so that a place that nobody wrote shows."""

    def poisoned(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return call

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
