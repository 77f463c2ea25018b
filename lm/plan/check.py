"""How good lm.plan.planner's estimates are on this machine: python -m lm.plan.check (minutes).

Each configuration is estimated by `planner`, and then measured by train.py with debug=profile, both
in processes of their own. None of them is part of what `calibration` measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.errors import UserError
from lm.machine.files import write_text
from lm.plan.step_times import ALL, BF16, FP32, measure
from lm.plan.trial_run import output_of

TINY = ["model=tiny", "schedule=tiny"]
# Models, lengths, windows, precisions, dropout and what is kept: all of them differ. The constants
# of the memory's estimate were set on others.
CASES = {
    "tiny-2": [*TINY, "stage=2", "trainer.micro_batch=4", BF16, ALL],
    "tiny-3": [*TINY, "stage=3", "trainer.micro_batch=2", BF16, "model.dropout=0.1"],
    "tiny-4": [*TINY, "stage=4", "trainer.micro_batch=1", FP32],
    "small-1": ["stage=1", "trainer.micro_batch=4", BF16],
    "small-2-fp32": ["stage=2", FP32, ALL],
    "small-2-bf16": ["stage=2", BF16, ALL, "model.dropout=0"],
    "small-3": ["stage=3", BF16],
    "large-1": ["experiment=enwik8_large", "stage=1", BF16],
}
TIME, MEMORY = 0.25, 0.15


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step and bytes at its peak, estimated and measured."""

    seconds: float
    measured_seconds: float
    bytes: int
    measured_bytes: int

    @property
    def fits(self) -> bool:
        """Whether both estimates are as good as they should be."""
        time = self.seconds / self.measured_seconds
        memory = self.bytes / self.measured_bytes
        return abs(time - 1) <= TIME and abs(memory - 1) <= MEMORY


def compare(overrides: Sequence[str]) -> Comparison:
    """Estimate and measure one configuration.

    Raises:
        UserError: with the message of what failed.
    """
    plan = json.loads(output_of(["-m", "lm.plan", "--json", "debug=profile", *overrides]))[0]
    (cost,) = measure(["profile.steps=2", "profile.recorded=0", *overrides])
    return Comparison(
        plan["step_seconds"], cost.seconds, sum(plan["memory"].values()), cost.peak_bytes
    )


def row(name: str, found: Comparison) -> str:
    """A readable line."""
    return (
        f"{name:<14}{found.seconds:>11.3f}{found.measured_seconds:>11.3f}"
        f"{found.seconds / found.measured_seconds:>8.2f}"
        f"{found.bytes / 1e9:>13.2f}{found.measured_bytes / 1e9:>11.2f}"
        f"{found.bytes / found.measured_bytes:>8.2f}"
    )


def summary(found: Mapping[str, Comparison]) -> str:
    """How many estimates are as good as they should be."""
    good = sum(each.fits for each in found.values())
    return f"{good} of {len(found)} within {TIME:.0%} of the time and {MEMORY:.0%} of the memory"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.plan.check", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--case", action="append", choices=CASES, help="may be given repeatedly")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("overrides", nargs="*", help="of train.py, for every case")
    options = parser.parse_intermixed_args(arguments)
    sys.stdout.write(
        f"{'case':<14}{'s estim.':>11}{'measured':>11}{'ratio':>8}{'GB estim.':>13}"
        f"{'measured':>11}{'ratio':>8}\n"
    )
    found = {}
    try:
        for name in options.case or CASES:
            found[name] = compare([*CASES[name], *options.overrides])
            sys.stdout.write(row(name, found[name]) + "\n")
            sys.stdout.flush()
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(summary(found) + "\n")
    if options.json:
        content = {name: vars(each) for name, each in found.items()}
        write_text(options.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
