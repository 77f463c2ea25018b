"""CUDA source to machine code for one architecture, kept on disk.

NVRTC is asked first: torch's CUDA builds bring it, its version is the one that torch runs with on
this driver, and it needs no host compiler. Without it nvcc is called. Neither needs a GPU.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import filelock
import torch

from kernels.build.library import cache_folder
from kernels.cuda.program import Parameter, Program, read_parameters

_logger = logging.getLogger("longchar.kernels")
_SOURCES = (
    "build/cubins",
    "cuda/layout",
    "cuda/program",
    "cuda/backward",
    "cuda/band",
    "cuda/distances",
    "cuda/forward",
    "cuda/keys",
    "cuda/products",
    "cuda/source",
    "cuda/tiles",
    "dropout_tir",
)
_LOCK_SECONDS = 600
_COMPILE_SECONDS = 300


class CompileError(RuntimeError):
    """A CUDA compiler refused a program; the message names the compiler and the architecture."""


class Cubin(NamedTuple):
    """A program's machine code and its kernel's parameters."""

    code: bytes
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Nvcc:
    """NVIDIA's compiler as a command."""

    command: str

    @functools.cached_property
    def name(self) -> str:
        """The compiler and its CUDA version."""
        text = self._run(["--version"]).stdout
        release = re.search(r"release ([\d.]+)", text)
        return f"nvcc of CUDA {release[1] if release else 'unknown'}"

    def compile(self, source: str, arch: str) -> bytes:
        """Return the cubin for an architecture such as sm_90; raise CompileError."""
        with tempfile.TemporaryDirectory(prefix="longchar-cuda-") as folder:
            text, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
            text.write_text(source)
            # TVM's text declares names that it does not use; -w keeps nvcc from listing them.
            done = self._run(["-cubin", f"-arch={arch}", "-w", "-o", str(cubin), str(text)])
            if done.returncode:
                raise CompileError(_refusal(self.name, arch, done.stderr))
            return cubin.read_bytes()

    def _run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.command, *arguments],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )


class Nvrtc:
    """NVIDIA's compiler as a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take the loaded library."""
        self._library = library

    @functools.cached_property
    def name(self) -> str:
        """The compiler and its CUDA version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"NVRTC of CUDA {major.value}.{minor.value}"

    def compile(self, source: str, arch: str) -> bytes:
        """Return the cubin for an architecture such as sm_90; raise CompileError."""
        program = ctypes.c_void_p()
        create = self._library.nvrtcCreateProgram
        text = ctypes.c_char_p(source.encode())
        self._check(create(ctypes.byref(program), text, b"kernel.cu", 0, None, None))
        try:
            options = (ctypes.c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"-w")
            if self._library.nvrtcCompileProgram(program, len(options), options):
                log = self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                raise CompileError(_refusal(self.name, arch, log.rstrip(b"\0").decode()))
            return self._text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, measure: str, fetch: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, measure)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, fetch)(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise CompileError(f"NVRTC: {describe(status).decode()}")


def _refusal(compiler: str, arch: str, log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    said = next((line for line in lines if "error" in line or "nsupported" in line), "")
    return f"{compiler} cannot compile for {arch}: {said or (lines or ['no message'])[0]}".strip()


@functools.cache
def find_compiler() -> Nvcc | Nvrtc | None:
    """Return the CUDA compiler of this machine, or None."""
    library = find_nvrtc(torch.version.cuda)
    if library is not None:
        return Nvrtc(library)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    command = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    return None if command is None else Nvcc(command)


def find_nvrtc(cuda: str | None) -> ctypes.CDLL | None:
    """Return the NVRTC of torch's CUDA version, such as "12.8", or None."""
    if cuda is None:
        return None
    name = f"libnvrtc.so.{cuda.split('.')[0]}"
    spec = importlib.util.find_spec("nvidia")  # where pip puts what torch's wheels need
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    paths = sorted(path for folder in folders for path in folder.glob(f"*/lib/{name}"))
    for path in (*paths, Path(name)):
        try:
            return load_nvrtc(path)
        except OSError:
            _logger.debug("cannot load %s", path, exc_info=True)
    return None


def load_nvrtc(path: Path) -> ctypes.CDLL:
    """Load NVRTC, a path or a bare name; from a folder, with its other half before it.

    It would look for that one where the system keeps libraries. Raises OSError.
    """
    if path.is_absolute():
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


def load_cubin(program: Program, arch: str) -> Cubin:
    """Return a program's machine code, compiled if it is not cached.

    Raises CompileError.
    """
    path = cubin_path(program, arch)
    cubin = _read(path)
    if cubin is None:
        with filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            cubin = _read(path)  # somebody may have been faster
            if cubin is None:
                cubin = _compile(program, arch)
                _write(path, cubin)
    return cubin


def why_not(program: Program, arch: str) -> str | None:
    """Return None if a program is cached or can be compiled here, else the reason in one line."""
    if cubin_path(program, arch).exists():
        return None
    if importlib.util.find_spec("tvm") is None:
        return "TVM is not installed (pip install apache-tvm)"
    if find_compiler() is None:
        return (
            f"no CUDA compiler for {arch}: torch {torch.__version__} brings no NVRTC, and nvcc is "
            "not on PATH nor in CUDA_HOME"
        )
    return None


def cubin_path(program: Program, arch: str) -> Path:
    """Return where a program's machine code is kept; the name changes with whatever makes it."""
    digest = hashlib.sha256(_fingerprint().encode())
    digest.update(repr((program.name, sorted(asdict(program.tile).items()))).encode())
    stem = f"{program.name}-d{program.tile.dim}-{arch}-{digest.hexdigest()[:20]}"
    return cache_folder() / f"{stem}.cubin"


def _compile(program: Program, arch: str) -> Cubin:
    from kernels.cuda.source import cuda_source

    compiler = find_compiler()
    if compiler is None:
        raise CompileError(why_not(program, arch) or f"no CUDA compiler for {arch}")
    source = cuda_source(program.name, program.tile)
    return Cubin(compiler.compile(source, arch), read_parameters(program, source))


def _write(path: Path, cubin: Cubin) -> None:
    """Write one line of JSON and the code, into place in one step."""
    head = {"sha256": hashlib.sha256(cubin.code).hexdigest(), "parameters": cubin.parameters}
    handle, fresh = tempfile.mkstemp(prefix=path.stem, suffix=".building", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + cubin.code)
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def _read(path: Path) -> Cubin | None:
    """Return what was kept if it is whole; say so and return None if it is damaged."""
    try:
        line, _, code = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    try:
        head = json.loads(line)
        parameters = tuple(Parameter(*fields) for fields in head["parameters"])
        whole = hashlib.sha256(code).hexdigest() == head["sha256"]
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        _logger.warning("the cached kernel %s is damaged; compiling it again", path)
        return None
    return Cubin(code, parameters)


@functools.cache
def _fingerprint() -> str:
    """Return a digest of the generating sources and of TVM's version."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parents[1] / f"{name}.py").read_bytes())
    try:
        digest.update(importlib.metadata.version("apache-tvm").encode())
    except importlib.metadata.PackageNotFoundError:
        digest.update(b"no TVM")
    return digest.hexdigest()
