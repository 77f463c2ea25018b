"""Which backends there are, which can run a call, and which one is taken."""

import functools
import importlib
import logging
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.band import Band
from kernels.call import Call, make_call

FASTEST_FIRST = ("tvm", "chunks", "loop", "dense")
_MODULES = {
    "tvm": "kernels.tvm_backend.cpu",
    "chunks": "kernels.torch_backends.chunks",
    "loop": "kernels.torch_backends.loop",
    "dense": "kernels.reference",
}
_logger = logging.getLogger("longchar.kernels")


class BackendError(RuntimeError):
    """A backend asked for by name does not exist or cannot run the call."""


@runtime_checkable
class Backend(Protocol):
    """What a backend's module offers."""

    def can_run(self, call: Call) -> str | None:
        """Return None, or in one line why this backend cannot run the call."""

    def attend(self, call: Call) -> Tensor:
        """Return the attention's output in the type of the call's tensors."""


def why_not(name: str, call: Call) -> str | None:
    """Return None if the backend can run the call, else the reason in one line."""
    backend = _load(name)
    return backend if isinstance(backend, str) else backend.can_run(call)


def choose_backend(call: Call, name: str = "auto") -> tuple[str, Backend]:
    """Return the name and the module of the backend that runs the call.

    `auto` is the fastest that can run; which one that is, and why no faster one, is logged once.
    Raises BackendError when the backend asked for by name does not exist or cannot run.
    """
    if name == "auto":
        chosen, text = _choose_fastest(call)
        _say_once(text)
    elif name not in FASTEST_FIRST:
        raise BackendError(
            f"there is no attention backend {name!r}; choose auto or one of "
            f"{', '.join(FASTEST_FIRST)}"
        )
    elif (reason := why_not(name, call)) is not None:
        raise BackendError(f"the attention backend {name!r} cannot run: {reason}")
    else:
        chosen = name
    backend = _load(chosen)
    assert not isinstance(backend, str)
    return chosen, backend


def describe_choice(
    name: str = "auto",
    *,
    dim: int = 64,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return one line for the start of a run: the backend taken, and why no faster one.

    Raises BackendError as `choose_backend` does.
    """
    tensor = torch.zeros(1, 1, 1, dim, device=device, dtype=dtype)
    call = make_call(tensor, tensor, tensor, Band(0, (1,)))
    if name == "auto":
        return _choose_fastest(call)[1]
    return f"attention backend: {choose_backend(call, name)[0]} (asked for by name)"


def _choose_fastest(call: Call) -> tuple[str, str]:
    reasons: list[str] = []
    for name in FASTEST_FIRST:
        reason = why_not(name, call)
        if reason is None:
            faster = f" (not {'; not '.join(reasons)})" if reasons else ""
            return name, f"attention backend: {name}{faster}"
        reasons.append(f"{name}: {reason}")
    raise BackendError(f"no attention backend can run: {'; '.join(reasons)}")


@functools.cache
def _load(name: str) -> Backend | str:
    """Return the backend's module, or why it cannot be imported."""
    try:
        module: Backend = importlib.import_module(_MODULES[name])
    except ImportError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return module


@functools.cache
def _say_once(text: str) -> None:
    _logger.info(text)
