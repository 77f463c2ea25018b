"""How a run ended, beside general compressors: `python -m lm.measuring.compressors demo`."""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.corpus import DataError
from kernels import BackendError
from lm.config.command_schemas import EvalConfig, SampleConfig, merged_data
from lm.config.corpus import corpus_of
from lm.config.schema import UserError
from lm.inference.sampling import sample_command
from lm.inference.trained_model import open_source
from lm.measuring.evaluation import evaluate_command
from lm.training.progress import say

COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda text: gzip.compress(text, 9),
    "bzip2 -9": lambda text: bz2.compress(text, 9),
    "xz -9": lambda text: lzma.compress(text, preset=9),
}


def compressed_bits(compress: Callable[[bytes], bytes], train: bytes, test: bytes) -> float:
    """Bits per character that a compressor needs for `test`.

    It may have read the training text too: the smaller counts of what `test` takes alone, and of
    what the compressed training text grows by when `test` is appended.
    """
    alone = len(compress(test))
    grown = len(compress(train + test)) - len(compress(train))
    return 8 * min(alone, grown) / len(test)


def stages(folder: Path) -> list[dict[str, Any]]:
    """What the run's stages say of themselves, in order."""
    found = sorted(folder.glob("stage*/state.json"), key=lambda path: path.parent.name)
    return [{"stage": path.parent.name, **json.loads(path.read_text())} for path in found]


def report(run: str, runs_dir: str, prompt: str) -> None:
    """Evaluate the test split, measure the compressors on it, sample, and print it all."""
    folder = Path(runs_dir) / run
    result = evaluate_command(EvalConfig(run=run, runs_dir=runs_dir))
    assert result is not None
    source = open_source(EvalConfig(run=run, runs_dir=runs_dir))
    corpus = corpus_of(merged_data(source.checkpoint["config"]["data"], EvalConfig().data))
    train, test = (corpus.splits[name].read().tobytes() for name in ("train", "test"))
    rows = [(f"{run}, {result['parameters']:,} parameters", result["bpc"])]
    rows += [(name, compressed_bits(c, train, test)) for name, c in COMPRESSORS.items()]
    lines = ["", f"Bits per character on the test split of {corpus.name} ({len(test):,} bytes)", ""]
    lines += [f"  {name:<40} {bits:6.3f}" for name, bits in sorted(rows, key=lambda row: row[1])]
    lines += ["", "Best BPC on valid after each stage", ""]
    lines += [f"  {state['stage']:<40} {state['best_bpc']:6.3f}" for state in stages(folder)]
    lines += ["", "A sample, temperature 0.8:", ""]
    say("\n".join(lines))
    sample_command(
        SampleConfig(run=run, runs_dir=runs_dir, prompt=prompt, length=400, temperature=0.8)
    )
    say(f"\nCheckpoints, metrics and results: {folder.resolve()}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m lm.measuring.compressors", description=__doc__)
    parser.add_argument("run", help="name of a finished run")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--prompt", default="def ", help="of the sample")
    options = parser.parse_args(arguments)
    try:
        report(options.run, options.runs_dir, options.prompt)
    except (UserError, DataError, BackendError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
