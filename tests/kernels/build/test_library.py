"""The disk cache of compiled kernels: light loading, faults, many processes, unwritable folders.

One real library, compiled at the start, stands for what a compiler would write.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.build import cpu_compiler as build
from kernels.build import library
from tests.kernels.tester import types_of

ROOT = Path(__file__).parents[3]
VARIANT = library.variant_for("forward", 16, False, False)
OTHER_TARGETS = [
    library.Target("other", "x86-64", library.machine_target().tile),
    library.Target(library.machine_target().name, "other", library.machine_target().tile),
]
SLOW_COMPILER = """
import multiprocessing, os, shutil, sys, time
from kernels.build import cpu_compiler as build, library
def compile_library(variant, path):
    print("compiling", flush=True)
    path.write_bytes(b"half of it")
    time.sleep(float(os.environ["SECONDS_TO_COMPILE"]))
    shutil.copyfile(os.environ["READY_LIBRARY"], path)
build.compile_library = compile_library
def load():
    assert library.load_kernels(library.variant_for("forward", 16, False, False))["forward"]
"""
ONE = SLOW_COMPILER + "load()"
# Forked, so that torch is imported once.
THREE = (
    SLOW_COMPILER
    + """
context = multiprocessing.get_context("fork")
processes = [context.Process(target=load) for _ in range(3)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(sum(process.exitcode != 0 for process in processes))
"""
)
ATTEND = """
import sys, torch
from kernels import Band, banded_attention
q = torch.randn(1, 40, 1, 16)
out = banded_attention(q, q, q, Band(7, (1,)), backend="tvm")
expected = banded_attention(q.double(), q.double(), q.double(), Band(7, (1,)), backend="dense")
assert (out - expected).abs().max() < 5e-6
assert "tvm" not in sys.modules
"""


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole library."""
    types_of("tvm")
    path = tmp_path_factory.mktemp("ready") / "ready.so"
    build.compile_library(VARIANT, path)
    return path


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Forget what this process has loaded; and afterwards what the test made it load."""

    def clear() -> None:
        for function in (library.load_kernels, library.cache_folder, library.why_not):
            function.cache_clear()
        build.why_no_compiler.cache_clear()

    clear()
    yield clear
    clear()


@pytest.fixture
def compiled(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> list[Path]:
    """The paths that the compiler was asked to write, in an empty cache."""
    paths: list[Path] = []

    def compile_library(variant: library.Variant, path: Path) -> None:
        paths.append(path)
        shutil.copyfile(ready, path)

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setenv("LONGCHAR_CACHE", str(tmp_path / "cache"))
    return paths


def load() -> Any:
    library.load_kernels.cache_clear()
    return library.load_kernels(VARIANT)["forward"]


def cached() -> Path:
    return library.cache_folder() / f"{VARIANT.stem}.so"


def test_compiled_once_and_nothing_else_is_left(compiled: list[Path]) -> None:
    load()
    load()
    assert len(compiled) == 1
    suffixes = {file.suffix for file in library.cache_folder().iterdir()}
    assert suffixes <= {".so", ".sha256", ".lock"}


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def without_digest(path: Path) -> None:
    path.with_suffix(".sha256").unlink()


@pytest.mark.parametrize("fault", [truncated, damaged, emptied, without_digest])
def test_what_is_damaged_is_compiled_again(
    fault: Callable[[Path], None], compiled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    load()
    # A new file: the process has the old one mapped, and would crash if it shrank.
    whole = cached().read_bytes()
    cached().unlink()
    cached().write_bytes(whole)
    fault(cached())
    load()
    assert len(compiled) == 2
    assert ("is damaged; compiling it again" in caplog.text) == (fault is not without_digest)
    assert library.find_library(VARIANT) == cached()


def test_a_failed_compilation_leaves_nothing(
    compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(variant: library.Variant, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise RuntimeError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(build, "compile_library", fail)
        with pytest.raises(RuntimeError, match="no space left"):
            load()
    assert not list(library.cache_folder().glob("*.so"))
    assert not list(library.cache_folder().glob("*.building"))
    load()


def test_another_instruction_set_has_another_key() -> None:
    names = {
        library.Variant("forward", 16, False, False, target).stem
        for target in (library.machine_target(), *OTHER_TARGETS)
    }
    assert len(names) == len({library.machine_target(), *OTHER_TARGETS})


@pytest.mark.parametrize("home", ["/dev/null", ""])
def test_a_home_that_cannot_be_written_is_said_once(
    home: str,
    tmp_path: Path,
    compiled: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("LONGCHAR_CACHE", str(blocked) if home == "" else "")
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(library.tempfile, "tempdir", str(tmp_path))
    load()
    load()
    assert caplog.text.count("compiled kernels cannot be kept in") == 1
    assert cached().parent.parent == tmp_path
    assert len(compiled) == 1


def test_a_temporary_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.tempfile, "tempdir", str(tmp_path))
    expected = tmp_path / f"longchar-kernels-{os.getuid()}"
    expected.mkdir()
    expected.chmod(0o777)
    assert library._private_folder() != expected


def test_reasons_without_a_compiler(
    compiled: list[Path], monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert "no C compiler was found" in str(library.why_not(VARIANT))
    load()
    forget()
    assert library.why_not(VARIANT) is None  # what is compiled needs none
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    forget()
    assert "TVM is not installed" in str(library.why_not(VARIANT))


def start(code: str, cache: Path, **changes: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "LONGCHAR_CACHE": str(cache), "PYTHONPATH": str(ROOT), **changes}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_cached_kernel_needs_neither_the_whole_of_tvm_nor_a_compiler(
    compiled: list[Path], tmp_path: Path
) -> None:
    load()
    process = start(ATTEND, tmp_path / "cache", PATH="/nowhere", CC="", CXX="")
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages


def test_many_processes_at_once_compile_once(ready: Path, tmp_path: Path) -> None:
    settings = {"READY_LIBRARY": str(ready), "SECONDS_TO_COMPILE": "0.5"}
    process = start(THREE, tmp_path, **settings)
    out, messages = process.communicate(timeout=150)
    assert process.returncode == 0, messages
    assert out.count("compiling") == 1


def test_a_killed_build_leaves_nothing_that_counts(
    ready: Path, tmp_path: Path, compiled: list[Path]
) -> None:
    settings = {"READY_LIBRARY": str(ready), "SECONDS_TO_COMPILE": "100"}
    process = start(ONE, tmp_path / "cache", **settings)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert library.find_library(VARIANT) is None
    load()
    assert len(compiled) == 1
    assert library.find_library(VARIANT) == cached()
