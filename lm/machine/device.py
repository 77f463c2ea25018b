"""What the run computes on: the device, its precision, and how fast it multiplies matrices."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lm.errors import ConfigError
from lm.machine.files import write_text

PACKAGES = ("torch", "pytorch-lightning", "hydra-core", "apache-tvm", "numpy")

# Of the numbers in matrix products, by Lightning's name of the precision.
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Device:
    """One process's device.

    Attributes:
        kind: cpu or cuda, as torch and Lightning name it.
        name: of the processor or GPU, with the number of threads on a CPU.
        precision: in Lightning's words: 32-true, bf16-mixed or 16-mixed.
        peak: measured floating-point operations per second of a matrix product in that precision.
    """

    kind: str
    name: str
    precision: str
    peak: float


def choose_device(accelerator: str, precision: str, threads: int | None) -> Device:
    """Find the device that the keys of `trainer` ask for, and measure it (about 0.2 s).

    Raises:
        ConfigError: if it is not there or cannot compute in the precision asked for.
    """
    cuda = torch.cuda.is_available()
    if accelerator == "gpu" and not cuda:
        raise ConfigError(
            "trainer.accelerator=gpu: torch finds no CUDA device; use trainer.accelerator=cpu, or "
            "install a CUDA build of torch"
        )
    kind = "cuda" if cuda and accelerator != "cpu" else "cpu"
    if threads is not None:
        torch.set_num_threads(threads)
    precision = choose_precision(precision, kind)
    if kind == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{processor()}, {torch.get_num_threads()} threads"
    return Device(kind, name, precision, matrix_rate(kind, DTYPES[precision]))


def choose_precision(asked: str, kind: str) -> str:
    """Lightning's name of the precision; auto takes bf16 where it is native.

    Raises:
        ConfigError: for fp16 on a CPU, which has no fast fp16 and no scaler.
    """
    if asked == "16-mixed" and kind == "cpu":
        raise ConfigError(
            "trainer.precision=16-mixed: needs a GPU; on a CPU use bf16-mixed, 32-true or auto"
        )
    if asked != "auto":
        return asked
    if kind == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported(False) else "16-mixed"
    return "bf16-mixed" if native_bf16() else "32-true"


def native_bf16() -> bool:
    """Whether this CPU multiplies in bf16 (AVX-512 BF16 or AMX), not by emulation."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def matrix_rate(kind: str, dtype: torch.dtype, size: int = 1024) -> float:
    """Floating-point operations per second of torch.mm.

    Some products warm up; of the others the faster half counts, since what disturbs a product only
    ever makes it slower.
    """
    if kind == "cuda":
        size = 4096
    a = torch.ones(size, size, dtype=dtype, device=kind)
    seconds = []
    for _ in range(14):
        start = time.perf_counter()
        torch.mm(a, a)
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(sorted(seconds[2:])[:6])


def processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_environment(path: Path, device: Device) -> None:
    """Record what the run runs on: versions, device, command, git revision."""
    record = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device.name,
        "precision": device.precision,
        "matrix_gflops": round(device.peak / 1e9, 1),
        "command": sys.argv,
        "revision": _revision(),
    }
    write_text(path, json.dumps(record, indent=2) + "\n")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    """The checkout's git revision, marked if files differ from it; empty outside git."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
