"""The typed schemas of eval.py, sample.py and compress.py, and the checks that cross their fields.

What concerns the model and its training comes from the checkpoint; nothing of it is set here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lm.config.schema import LARGEST_SEED, MOST_THREADS, ConfigError, DataConfig

NEWLINE = ord("\n")
PROTOCOLS = ("stream", "overlap", "paper")


@dataclass
class DataOverride:
    """Fields of `schema.DataConfig` that replace the checkpoint's; null: as in the checkpoint.

    A path makes the corpus a file unless `name` is given too.
    """

    name: str | None = None
    root: str | None = None
    path: str | None = None
    train_path: str | None = None
    valid_path: str | None = None
    test_path: str | None = None
    fractions: list[float] | None = None
    allow_nonstandard: bool | None = None


@dataclass
class ComputeConfig:
    """What to compute on; see `schema.TrainerConfig`. Precision is float32 unless asked."""

    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    precision: str = "32-true"
    threads: int | None = None


@dataclass
class SourceConfig:
    """Which weights: a run's (its best of the highest finished stage), or those of a file.

    Attributes:
        run: name of a folder in `runs_dir`.
        stage: a finished stage of the run, if not the highest.
        ckpt: path of a checkpoint.
        backend: of the attention; empty: as in the checkpoint.
    """

    run: str = ""
    stage: int | None = None
    runs_dir: str = "runs"
    ckpt: str = ""
    backend: str = ""


@dataclass
class CurvesConfig:
    """What explains the number, besides the curve of the scored characters themselves.

    Attributes:
        contexts: also score the same characters with so many characters before them, each time;
            empty: do not.
        blocks, block: how many runs of how many characters are scored for that.
    """

    contexts: list[int] = field(default_factory=list)
    blocks: int = 64
    block: int = 64


@dataclass
class EvalConfig(SourceConfig):
    """One evaluation: `python eval.py`.

    Attributes:
        split: train, valid or test.
        protocol: stream, overlap or paper; see docs/evaluation.md.
        window, step: of overlap and paper, in characters.
        context: none, or previous: the preceding split is read first.
        newlines: all, or skip: they are read, but their losses are left out of the number.
        max_chars: score only so many characters, from the split's beginning; null: all.
        chunk: positions per forward pass. batch: windows per forward pass; null: as many as
            keep within `chunk`. Neither changes the number.
        results: folder of the result; empty: runs_dir/run/results, or for `ckpt` none.
    """

    split: str = "test"
    protocol: str = "stream"
    window: int = 32_256
    step: int = 512
    context: str = "none"
    newlines: str = "all"
    max_chars: int | None = None
    chunk: int = 4096
    batch: int | None = None
    results: str = ""
    curves: CurvesConfig = field(default_factory=CurvesConfig)
    data: DataOverride = field(default_factory=DataOverride)
    trainer: ComputeConfig = field(default_factory=ComputeConfig)


@dataclass
class SampleConfig(SourceConfig):
    """Text from a model: `python sample.py`.

    Attributes:
        prompt: text before the sample. prompt_file: its bytes from a file instead.
        length: characters to make.
        temperature: logits are divided by it; 0: always the likeliest character.
        top_k: choose among so many of the likeliest; 0: among all.
        seed: of the choice.
        output: a file that gets the prompt and the sample, byte for byte, instead of the terminal.
    """

    prompt: str = ""
    prompt_file: str = ""
    length: int = 500
    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1
    output: str = ""
    trainer: ComputeConfig = field(default_factory=ComputeConfig)


@dataclass
class CompressConfig(SourceConfig):
    """A file turned into a smaller one and back: `python compress.py compress|decompress`.

    Attributes:
        action: compress or decompress.
        input, output: files. overwrite: replace an `output` that exists.
    """

    action: str = ""
    input: str = ""
    output: str = ""
    overwrite: bool = False
    trainer: ComputeConfig = field(default_factory=lambda: ComputeConfig(threads=1))


def check_eval(config: EvalConfig) -> None:
    """Refuse what cannot be evaluated; raises ConfigError that names the key."""
    check_source(config)
    check_compute(config.trainer)
    one_of("split", config.split, ("train", "valid", "test"))
    one_of("protocol", config.protocol, PROTOCOLS)
    one_of("context", config.context, ("none", "previous"))
    one_of("newlines", config.newlines, ("all", "skip"))
    at_least_1("window", config.window)
    at_least_1("chunk", config.chunk)
    for key, value in (("batch", config.batch), ("max_chars", config.max_chars)):
        if value is not None:
            at_least_1(key, value)
    if not 1 <= config.step <= config.window:
        raise ConfigError(
            f"step={config.step} with window={config.window}: step must be 1 to window, or some "
            "characters would be scored twice or never"
        )
    if config.context == "previous" and config.split == "train":
        raise ConfigError(
            "context=previous with split=train: no split precedes train; use context=none"
        )
    for context in config.curves.contexts:
        at_least_1("curves.contexts", context)
    at_least_1("curves.blocks", config.curves.blocks)
    at_least_1("curves.block", config.curves.block)


def check_sample(config: SampleConfig) -> None:
    """Refuse what cannot be sampled; raises ConfigError that names the key."""
    check_source(config)
    check_compute(config.trainer, one_device=True)
    at_least_1("length", config.length)
    if not 0 <= config.seed <= LARGEST_SEED:
        raise ConfigError(f"seed={config.seed}: expected 0 to {LARGEST_SEED}")
    for key, value in (("temperature", config.temperature), ("top_k", config.top_k)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{key}={value}: expected at least 0")
    if config.prompt and config.prompt_file:
        raise ConfigError(
            f"prompt={config.prompt!r} and prompt_file={config.prompt_file}: give one of them"
        )


def check_compress(config: CompressConfig) -> None:
    """Refuse what cannot be compressed; raises ConfigError that names the key."""
    if config.action not in ("compress", "decompress"):
        raise ConfigError(
            f"action={config.action!r}: expected python compress.py compress or decompress, then "
            "run=NAME input=FILE output=FILE"
        )
    for key in ("input", "output"):
        if not getattr(config, key):
            raise ConfigError(f"{key}: no value given; expected {key}=FILE")
    if config.backend:
        raise ConfigError(
            f"backend={config.backend}: compression has one way of computing, without attention "
            "backends; leave it out"
        )
    check_source(config)
    check_compute(config.trainer, one_device=True)


def check_source(config: SourceConfig) -> None:
    """Exactly one of `run` and `ckpt`."""
    if bool(config.run) == bool(config.ckpt):
        found = f"run={config.run} and ckpt={config.ckpt}" if config.run else "neither"
        raise ConfigError(f"run, ckpt: found {found}; give run=NAME or ckpt=PATH")
    if "/" in config.run:
        raise ConfigError(
            f"run={config.run}: expected the name of a folder in runs_dir={config.runs_dir}; "
            "ckpt=PATH takes a checkpoint anywhere"
        )
    if config.stage is not None:
        at_least_1("stage", config.stage)
        if config.ckpt:
            raise ConfigError(f"stage={config.stage}: only with run=NAME; ckpt names its own file")
    if config.backend:
        one_of("backend", config.backend, ("auto", "tvm", "chunks", "loop", "dense"))


def check_compute(config: ComputeConfig, *, one_device: bool = False) -> None:
    """The fields under `trainer`."""
    one_of("trainer.accelerator", config.accelerator, ("auto", "cpu", "gpu"))
    one_of("trainer.precision", config.precision, ("auto", "32-true", "bf16-mixed", "16-mixed"))
    for key in ("devices", "nodes"):
        at_least_1(f"trainer.{key}", getattr(config, key))
        if one_device and getattr(config, key) > 1:
            raise ConfigError(f"trainer.{key}={getattr(config, key)}: this command uses one device")
    if one_device and config.precision != "32-true":
        raise ConfigError(
            f"trainer.precision={config.precision}: this command computes in 32-true, since it "
            "makes one character at a time"
        )
    if config.threads is not None and not 1 <= config.threads <= MOST_THREADS:
        raise ConfigError(f"trainer.threads={config.threads}: expected 1 to {MOST_THREADS}")


def merged_data(recorded: dict[str, Any], override: DataOverride) -> DataConfig:
    """The checkpoint's corpus, with what the command line says instead."""
    given = {f.name: getattr(override, f.name) for f in fields(override)}
    given = {key: value for key, value in given.items() if value is not None}
    paths = {key for key in given if key.endswith("path")}
    if given.get("name", "file" if paths else recorded["name"]) != recorded["name"] or paths:
        # Another corpus: of the checkpoint's own, only the place where corpora lie still counts.
        recorded = {"root": recorded["root"], "name": "file"}
    known = {f.name for f in fields(DataConfig)}
    return DataConfig(**{k: v for k, v in (recorded | given).items() if k in known})


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}")


def at_least_1(key: str, value: int) -> None:
    """Raise ConfigError for less than 1."""
    if value < 1:
        raise ConfigError(f"{key}={value}: expected at least 1")
