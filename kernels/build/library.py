"""The disk cache of compiled kernels, and loading them without importing TVM.

A library is a shared object for one variant of one pass. Its name carries a key over everything
that determines it: the sources that generate it, TVM's version, the instruction set, the tiles, the
head dimension, and whether it has relative terms and dropout. Beside it lies its SHA-256, checked
before anything is loaded. Files appear by renaming, under a lock, so many processes may ask at once
and one that is killed leaves nothing that another would take for a library.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from kernels.cpu.targets import Target, machine_target

_logger = logging.getLogger("longchar.kernels")
_SOURCES = (
    "build/cpu_compiler",
    "cpu/targets",
    "cpu/tasks",
    "cpu/backward",
    "cpu/finish",
    "cpu/forward",
    "cpu/gradients",
    "cpu/pack",
    "cpu/program",
    "dropout_tir",
    "cpu/scores",
    "cpu/tiles",
)
_LOCK_SECONDS = 600


@dataclass(frozen=True)
class Variant:
    """What a library is compiled for; `kind` is forward or backward."""

    kind: str
    dim: int
    relative: bool
    dropout: bool
    target: Target

    @property
    def stem(self) -> str:
        """The library's file name without the suffix."""
        words = [self.kind, f"d{self.dim}"]
        words += ["rel"] * self.relative + ["drop"] * self.dropout + [self.target.name, self._key()]
        return "-".join(words)

    def _key(self) -> str:
        digest = hashlib.sha256(_fingerprint().encode())
        digest.update(repr(sorted(asdict(self).items(), key=lambda item: item[0])).encode())
        return digest.hexdigest()[:20]


@functools.cache
def variant_for(kind: str, dim: int, relative: bool, dropout: bool) -> Variant:
    """Return the variant for the processor that this runs on."""
    return Variant(kind, dim, relative, dropout, machine_target())


class Kernels(dict[str, Any]):
    """A library's kernels by name. Each is looked up once: small calls feel it."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library

    def __missing__(self, name: str) -> Any:
        """Look a kernel up."""
        self[name] = kernel = self._library[name]
        return kernel


@functools.cache
def load_kernels(variant: Variant) -> Kernels:
    """Return the variant's kernels, compiled if they are not cached.

    Raises what the compiler raises; see `why_not`.
    """
    path = find_library(variant)
    if path is None:
        from kernels.build.cpu_compiler import compile_library

        folder = cache_folder()
        path = folder / f"{variant.stem}.so"
        with filelock.FileLock(folder / f"{variant.stem}.lock", timeout=_LOCK_SECONDS):
            if find_library(variant) is None:  # nobody else has been faster
                _publish(variant, path, compile_library)
    return Kernels(_load(path))


def find_library(variant: Variant) -> Path | None:
    """Return the cached library if it is whole; say so and return None if it is damaged."""
    path = cache_folder() / f"{variant.stem}.so"
    try:
        content, digest = path.read_bytes(), _digest_path(path).read_text().strip()
    except FileNotFoundError:
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        _logger.warning("the cached kernel %s is damaged; compiling it again", path)
        return None
    return path


@functools.cache
def why_not(variant: Variant) -> str | None:
    """Return None if the variant is cached or can be compiled here, else the reason in one line."""
    if importlib.util.find_spec("tvm_ffi") is None or importlib.util.find_spec("tvm") is None:
        return "TVM is not installed (pip install apache-tvm)"
    if find_library(variant) is not None:
        return None
    from kernels.build.cpu_compiler import why_no_compiler

    return why_no_compiler()


@functools.cache
def cache_folder() -> Path:
    """Return the folder of compiled kernels, made if need be.

    $LONGCHAR_CACHE/kernels, else kernels in the user's cache folder; where that cannot be written,
    a private temporary folder, which is said once.
    """
    base = os.environ.get("LONGCHAR_CACHE")
    folder = (Path(base) if base else platformdirs.user_cache_path("longchar")) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder.resolve()
        reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    private = _private_folder()
    _logger.warning(
        "compiled kernels cannot be kept in %s (%s); using %s; LONGCHAR_CACHE may name a folder",
        folder,
        reason,
        private,
    )
    return private


def _private_folder() -> Path:
    """Return a temporary folder that only this user can write, the same in every process."""
    folder = Path(tempfile.gettempdir()) / f"longchar-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        mine = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
        if stat.S_ISDIR(status.st_mode) and mine:
            return folder
    except OSError:
        _logger.debug("cannot use %s", folder, exc_info=True)
    return Path(tempfile.mkdtemp(prefix="longchar-kernels-"))


def _publish(variant: Variant, path: Path, compile_library: Any) -> None:
    """Compile into a folder of its own, then rename both files into place."""
    work = Path(tempfile.mkdtemp(prefix=f"{variant.stem}.", suffix=".building", dir=path.parent))
    try:
        fresh = work / path.name
        compile_library(variant, fresh)
        _digest_path(fresh).write_text(hashlib.sha256(fresh.read_bytes()).hexdigest() + "\n")
        fresh.replace(path)
        _digest_path(fresh).replace(_digest_path(path))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _load(path: Path) -> Any:
    """Load a library with TVM's small runtime only: importing all of TVM takes seconds."""
    import tvm_ffi

    _load_runtime()
    return tvm_ffi.load_module(str(path))


@functools.cache
def _load_runtime() -> None:
    """Make the symbols that kernels need visible; without them a kernel would crash."""
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    suffix = {"Darwin": "dylib"}.get(os.uname().sysname, "so")
    library = Path(spec.origin).parent / "lib" / f"libtvm_runtime.{suffix}"
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@functools.cache
def _fingerprint() -> str:
    """Return a digest of the generating sources and TVM's version."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parents[1] / f"{name}.py").read_bytes())
    for package in ("apache-tvm", "apache-tvm-ffi"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()
