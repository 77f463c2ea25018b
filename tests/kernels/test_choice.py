"""Which backend runs, what is said about it, and what happens without TVM."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import BackendError, Band, backends, banded_attention, describe_choice
from tests.kernels.tester import types_of

ROOT = Path(__file__).parents[2]
WITHOUT_TVM = """
import importlib.machinery, logging, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("tvm", "tvm_ffi")
        return None if hidden else super().find_spec(name, path, target)

finders = [f for f in sys.meta_path if f is not importlib.machinery.PathFinder]
sys.meta_path[:] = [*finders, Without]
try:
    import tvm
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("TVM is there")

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import torch
from kernels import Band, BackendError, Relative, banded_attention, describe_choice
from kernels import device_check
from kernels.bench import table as bench
from kernels.build import cpu_compiler as build
from kernels.tvm_backend import cpu as function

q = torch.randn(1, 30, 2, 16, requires_grad=True)
relative = Relative(torch.randn(2, 6, 16), torch.randn(2, 16), torch.randn(2, 16))
for backend in ("auto", "auto", "chunks", "loop", "dense"):
    out = banded_attention(
        q, q, q, Band(5, (1, 2)), relative=relative, dropout=0.1, backend=backend
    )
    out.sum().backward()
assert describe_choice().startswith("attention backend: chunks (not tvm:")
try:
    banded_attention(q, q, q, Band(5, (1, 2)), backend="tvm")
except BackendError as error:
    print(error)
"""


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What was said and loaded before this test is forgotten."""

    def clear() -> None:
        backends._say_once.cache_clear()
        backends._load.cache_clear()

    clear()
    yield
    clear()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("attention backend")]


@pytest.mark.usefixtures("forgetful")
def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    types_of("tvm")
    caplog.set_level(logging.INFO)
    x = torch.randn(1, 8, 1, 16)
    for _ in range(3):
        banded_attention(x, x, x, Band(2, (1,)))
        banded_attention(x.double(), x.double(), x.double(), Band(2, (1,)))
        banded_attention(x, x, x, Band(2, (1,)), backend="loop")
    assert said(caplog) == [
        "attention backend: tvm",
        "attention backend: chunks "
        "(not tvm: it computes in float32; the tensors are torch.float64)",
    ]


def test_the_choice_can_be_asked_for() -> None:
    types_of("tvm")
    assert describe_choice() == "attention backend: tvm"
    assert describe_choice(dtype=torch.bfloat16) == "attention backend: tvm"
    assert describe_choice("loop") == "attention backend: loop (asked for by name)"
    said = describe_choice(dim=20)
    assert said.startswith("attention backend: chunks (not tvm: the head size must be a multiple")


def test_a_name_that_does_not_exist() -> None:
    x = torch.randn(1, 8, 1, 16)
    with pytest.raises(
        BackendError, match="no attention backend 'cuda'; choose auto or one of tvm, chunks, loop"
    ):
        banded_attention(x, x, x, Band(2, (1,)), backend="cuda")


def test_a_backend_asked_for_by_name_never_gives_way() -> None:
    x = torch.randn(1, 8, 1, 20)
    with pytest.raises(BackendError, match=r"'tvm' cannot run: the head size .* it is 20$"):
        banded_attention(x, x, x, Band(2, (1,)), backend="tvm")
    with pytest.raises(BackendError, match="'tvm' cannot run"):
        describe_choice("tvm", dim=20)


@pytest.mark.usefixtures("forgetful")
def test_a_module_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._MODULES, "tvm", "kernels.nowhere")
    assert describe_choice() == (
        "attention backend: chunks "
        "(not tvm: ModuleNotFoundError: No module named 'kernels.nowhere')"
    )
    with pytest.raises(BackendError, match="'tvm' cannot run: ModuleNotFoundError"):
        describe_choice("tvm")


@pytest.mark.usefixtures("forgetful")
def test_where_none_can_run_every_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in backends.FASTEST_FIRST:
        monkeypatch.setitem(backends._MODULES, name, f"kernels.nowhere_{name}")
    with pytest.raises(BackendError, match="no attention backend can run: tvm: .*; dense: .*"):
        describe_choice()


def test_everything_works_without_tvm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TVM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reason = "TVM is not installed (pip install apache-tvm)"
    assert done.stdout.splitlines() == [
        f"attention backend: chunks (not tvm: {reason})",
        f"the attention backend 'tvm' cannot run: {reason}",
    ]
