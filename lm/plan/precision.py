"""What lower precision costs in loss, and gives in speed and memory: python -m lm.plan.precision.

The same steps from the same seeds, once per precision that this device has, each in a run of
train.py; float32 is what the others are held against. Further arguments are those of train.py.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lm.errors import UserError
from lm.machine.files import write_text
from lm.plan.trial_run import trial_run

EXACT = "32-true"


@dataclass(frozen=True)
class Curve:
    """One run's numbers: training BPC of each step, BPC on valid at the end, speed and memory."""

    train_bpc: list[float]
    val_bpc: float
    characters_per_second: float
    peak_gb: float

    @classmethod
    def read(cls, path: Path) -> Curve:
        """From a metrics.csv with a row per step."""
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return cls(
            train_bpc=[float(row["train_bpc"]) for row in rows],
            val_bpc=float(rows[-1]["val_bpc"]),
            characters_per_second=statistics.median(
                float(row["characters_per_second"]) for row in rows
            ),
            peak_gb=max(float(row["memory_gb"]) for row in rows),
        )


def train(precision: str, steps: int, overrides: Sequence[str]) -> Curve:
    """Train the first stage for so many steps.

    Raises:
        UserError: with train.py's message, if it failed.
    """
    precise = [f"trainer.precision={precision}", "trainer.log_every=1"]
    stage = ["stage=1", f"schedule.stages.1.steps={steps}"]
    with trial_run([*stage, *overrides, *precise]) as folders:
        return Curve.read(folders[0] / "metrics.csv")


def difference(curve: Curve, exact: Curve) -> dict[str, float]:
    """How far the losses lie from float32's: the steps' mean and largest distance, and at the end.

    The sign of `end`, the mean of the last quarter of the steps, and of `val` tells who is worse.
    """
    apart = [a - b for a, b in zip(curve.train_bpc, exact.train_bpc, strict=True)]
    return {
        "mean": statistics.fmean(map(abs, apart)),
        "largest": max(map(abs, apart)),
        "end": statistics.fmean(apart[-max(1, len(apart) // 4) :]),
        "val": curve.val_bpc - exact.val_bpc,
    }


def table(curves: Mapping[str, Curve]) -> str:
    """Readable lines, one per precision."""
    exact = curves[EXACT]
    lines = [
        f"{len(exact.train_bpc)} steps, BPC; differences are to {EXACT}",
        f"{'precision':<12}{'train, end':>11}{'valid':>9}{'mean |diff|':>12}{'largest':>9}"
        f"{'at the end':>11}{'valid':>9}{'char/s':>9}{'peak GB':>9}",
    ]
    for precision, curve in curves.items():
        apart = difference(curve, exact)
        last = statistics.fmean(curve.train_bpc[-max(1, len(curve.train_bpc) // 4) :])
        lines.append(
            f"{precision:<12}{last:>11.4f}{curve.val_bpc:>9.4f}{apart['mean']:>12.5f}"
            f"{apart['largest']:>9.5f}{apart['end']:>+11.5f}{apart['val']:>+9.5f}"
            f"{curve.characters_per_second:>9,.0f}{curve.peak_gb:>9.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.plan.precision", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("overrides", nargs="*", help="of train.py; else experiment=demo")
    options = parser.parse_intermixed_args(arguments)
    precisions = [EXACT, "bf16-mixed"]
    if torch.cuda.is_available():
        precisions.append("16-mixed")
    else:
        sys.stdout.write("16-mixed is left out: it needs a CUDA device, and there is none\n")
    try:
        curves = {
            precision: train(precision, options.steps, options.overrides or ["experiment=demo"])
            for precision in precisions
        }
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(table(curves) + "\n")
    if options.json:
        content = {
            precision: dataclasses.asdict(curve) | {"difference": difference(curve, curves[EXACT])}
            for precision, curve in curves.items()
        }
        write_text(options.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
