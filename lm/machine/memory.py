"""How much memory this process uses, now and at most; on a GPU, torch's allocator."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

# Bytes of what a process loads with its first step on a CPU: kernels, their runtime, oneDNN.
FIRST_STEP = 70_000_000

_STATUS = Path("/proc/self/status")
_SYSTEM = Path("/proc/meminfo")
_CLEAR = Path("/proc/self/clear_refs")


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now: resident memory of the process, or what torch holds on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def peak_memory(device: torch.device) -> int:
    """Largest number of bytes in use since the start, or since `reset_peak_memory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def reset_peak_memory(device: torch.device) -> None:
    """Begin to watch for the peak anew, where the system can; else the old peak stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")


def memory_left(device: torch.device) -> float:
    """Bytes that this process could still get; infinite where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if _SYSTEM.exists():
        for line in _SYSTEM.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return float("inf")


def _status(key: str) -> int:
    """A line of Linux's status file, whose peak, unlike getrusage's, leaves out the parent's."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
