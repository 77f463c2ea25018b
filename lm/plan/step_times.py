"""Time and memory of training steps on this machine, each in a run of train.py with debug=profile.

python -m lm.plan.step_times                            the usual cases, as a table
python -m lm.plan.step_times --case n2048-fp32           some of them
python -m lm.plan.step_times stage=3 trainer.threads=1   any configuration of train.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lm.errors import UserError
from lm.machine.files import write_text
from lm.plan.trial_run import trial_run
from lm.training.profiling import StepCost

FP32 = "trainer.precision=32-true"
BF16 = "trainer.precision=bf16-mixed"
ALL = "trainer.gradient_checkpointing=false"
LONG = ["profile.steps=1", "profile.warm_up=0", "profile.recorded=0"]
# The small model, one sequence at a time. Those that take minutes run only when they are named.
CASES = {
    "n2048-fp32": ["stage=1", FP32, ALL],
    "n2048-bf16": ["stage=1", BF16, ALL],
    "n8192-fp32": ["stage=3", FP32, ALL],
    "n8192-bf16": ["stage=3", BF16, ALL],
    "one-process": ["stage=1", BF16, "trainer.threads=1"],
    "two-processes": ["stage=1", BF16, "trainer.threads=1", "trainer=ddp"],
    "stage5-fp32": ["stage=5", FP32, "profile.steps=1"],
    "stage5-bf16": ["stage=5", BF16, "profile.steps=1"],
    **{
        f"n{n}-bf16": ["stage=5", f"schedule.stages.5.sequence={n}", BF16, *LONG]
        for n in (32_768, 65_536, 131_072)
    },
}
USUAL = list(CASES)[:4]


def measure(overrides: Sequence[str]) -> list[StepCost]:
    """Run train.py with debug=profile and these arguments; the cost of a step of each stage.

    Raises:
        UserError: with its message, if it failed.
    """
    with trial_run(["debug=profile", *overrides]) as folders:
        return [StepCost.read(folder / "profile.json") for folder in folders]


def table(costs: dict[str, list[StepCost]]) -> str:
    """Readable lines, one per case and stage."""
    lines = [
        f"{'case':<14}{'stage':>6}{'characters':>18}{'precision':>12}{'threads':>8}{'kept':>7}"
        f"{'s/step':>9}{'update':>8}{'char/s':>9}{'of mm':>7}{'attention':>11}{'of FLOPs':>10}"
        f"{'peak GB':>9}"
    ]
    for name, case in costs.items():
        for cost in case:
            cut = f"{cost.processes} x {cost.sequences} x {cost.sequence}"
            lines.append(
                f"{name:<14}{cost.stage:>6}{cut:>18}{cost.precision:>12}{cost.threads:>8}"
                f"{'inputs' if cost.gradient_checkpointing else 'all':>7}{cost.seconds:>9.3g}"
                f"{cost.update_seconds:>8.2g}{cost.speed:>9,.0f}{cost.share_of_peak:>7.0%}"
                f"{cost.attention_share:>11.0%}{cost.attention_flops / cost.flops:>10.0%}"
                f"{cost.peak_bytes / 1e9:>9.2f}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.plan.step_times", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--case", action="append", choices=CASES, help="may be given repeatedly")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("overrides", nargs="*", help="of train.py; with --case, on top of it")
    options = parser.parse_intermixed_args(arguments)
    chosen = options.case or (["given"] if options.overrides else USUAL)
    try:
        costs = {name: measure([*CASES.get(name, []), *options.overrides]) for name in chosen}
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(table(costs) + "\n")
    if options.json:
        content = {name: [dataclasses.asdict(c) for c in case] for name, case in costs.items()}
        write_text(options.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
