"""The memory of one pass, measured in a fresh process (table.py says what is counted)."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from kernels.bench.cases import PASSES, Case, make_inputs, say


def measure_memory(case: Case, passes: str, threads: int) -> dict[str, int] | None:
    """Return the peak bytes of one pass beyond its inputs; None where /proc cannot tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    # Freed memory returns to the system at once, so that what is resident is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    order = json.dumps({"case": asdict(case), "passes": passes, "threads": threads})
    command = [sys.executable, "-m", "kernels.bench.memory", order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the memory measurement of {case} failed:\n{done.stderr}")
    result: dict[str, int] = json.loads(done.stdout)
    return result


def memory_of(order: str) -> dict[str, int]:
    """Measure one pass in this process, which should be fresh."""
    request = json.loads(order)
    torch.set_num_threads(request["threads"])
    case = Case(**{**request["case"], "strides": tuple(request["case"]["strides"])})
    small = Case(**{**asdict(case), "sequence": 8 * max(case.strides), "window": 3})
    for passes in PASSES:
        make_inputs(small).run(passes)
    inputs = make_inputs(case)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    inputs.run(request["passes"])
    beyond = _status("VmHWM") - before
    return {
        "beyond_inputs": beyond,
        "temporary": beyond - inputs.output_bytes(request["passes"]),
    }


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}")


if __name__ == "__main__":
    say(json.dumps(memory_of(sys.argv[1])))
