"""Where a stage begins: its own checkpoint, the stage before it, given weights, or nothing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from lm.checkpoint import CheckpointError, load_checkpoint, stage_of
from lm.config import Config, UserError
from lm.progress import say
from lm.schedule import Stage

# What has to be equal for one model's weights to fit another.
SHAPE = (
    "layers",
    "heads",
    "width",
    "feedforward",
    "tie_embedding",
    "output_bias",
    "attention_bias",
    "final_norm",
    "share_position_biases",
)


@dataclasses.dataclass(frozen=True)
class Start:
    """What a stage begins from; at most one of the two checkpoints is given.

    Attributes:
        resume: the stage's own checkpoint: weights, optimiser and counters go on.
        weights: a checkpoint whose weights are taken over.
        said: the same in words.
    """

    resume: Mapping[str, Any] | None = None
    weights: Mapping[str, Any] | None = None
    said: str = "from random weights"


def run_folder(config: Config) -> Path:
    """Where a run keeps its stages; trial runs have a place of their own."""
    folder = Path(config.runs_dir) / config.name
    return folder / "trial" if config.throwaway else folder


def stage_folder(config: Config, number: int) -> Path:
    """Where one stage keeps its files."""
    return run_folder(config) / f"stage{number}"


def plan_start(config: Config, stage: Stage, corpus: Corpus, folder: Path) -> Start:
    """Decide where a stage begins.

    Raises:
        UserError: if what it should begin from is missing, unfinished, damaged or another's.
    """
    if resume := newest_checkpoint(folder / "checkpoints"):
        refuse_other_run(resume, config, stage, corpus, folder)
        return Start(resume=resume, said=f"from its own step {resume['step']}")
    if config.init_from == "scratch" or (stage.number == 1 and not config.init_from):
        return Start()
    if config.init_from:
        path = Path(config.init_from)
        weights = load_checkpoint(path)
    else:
        path, weights = previous_stage(config, stage)
    refuse_other_model(weights, config, path)
    return Start(weights=weights, said=f"from the weights in {path} (step {weights['step']})")


def newest_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last whole checkpoint of a stage; a damaged one is named and the one before it used."""
    damaged = []
    for name in ("last.ckpt", "previous.ckpt"):
        if (folder / name).exists():
            try:
                found = load_checkpoint(folder / name)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            for text in damaged:
                say(f"warning: {text}; going on from {folder / name}", file=sys.stderr)
            return found
    if damaged:
        raise CheckpointError(f"{damaged[0]}; overwrite=true starts the stage again")
    return None


def previous_stage(config: Config, stage: Stage) -> tuple[Path, dict[str, Any]]:
    """The best weights of the stage before this one, which has to be finished."""
    number = stage.number - 1
    checkpoints = stage_folder(config, number) / "checkpoints"
    command = f"python train.py name={config.name} stage={number}"
    last = newest_checkpoint(checkpoints)
    if last is None:
        raise UserError(
            f"stage={stage.number} begins from stage {number}'s best weights, and {checkpoints} "
            f"has none; make them with: {command} (with this run's other settings), or give "
            "init_from=PATH or init_from=scratch"
        )
    if last["step"] < stage_of(last).steps:
        raise UserError(
            f"stage={stage.number} begins from stage {number}'s best weights, and stage {number} "
            f"is at step {last['step']} of {stage_of(last).steps}; go on with: {command}, or give "
            f"init_from={checkpoints / 'best.ckpt'}"
        )
    return checkpoints / "best.ckpt", load_checkpoint(checkpoints / "best.ckpt")


def refuse_other_run(
    found: Mapping[str, Any], config: Config, stage: Stage, corpus: Corpus, folder: Path
) -> None:
    """A stage goes on only with the model, schedule, seed and data that it began with."""
    pairs = {
        "stage": (found["stage"], dataclasses.asdict(stage)),
        "model": (found["model"], dataclasses.asdict(config.model)),
        "seed": (found["config"]["seed"], config.seed),
        "optim": (found["config"]["optim"], dataclasses.asdict(config.optim)),
        "data": (found["data"], data_record(corpus)),
    }
    for key, (then, now) in pairs.items():
        if different := difference(key, then, now):
            raise UserError(
                f"{folder} was begun with {different}; use the old value, another name=, or "
                "overwrite=true to start the stage again"
            )


def refuse_other_model(found: Mapping[str, Any], config: Config, path: Path) -> None:
    """Weights are taken over only by a model of the same shape."""
    for name in SHAPE:
        then, now = found["model"][name], getattr(config.model, name)
        if then != now:
            raise UserError(f"{path} holds a model with model.{name}={then}, this run has {now}")


def difference(key: str, then: Any, now: Any) -> str:
    """The first place where two plain values differ, in words; empty if there is none."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        ignored = {"backend"} if key == "model" else set()
        for name in sorted((then.keys() | now.keys()) - ignored):
            if found := difference(f"{key}.{name}", then.get(name), now.get(name)):
                return found
        return ""
    if isinstance(then, list | tuple) and isinstance(now, list | tuple):
        return "" if plain(then) == plain(now) else f"{key}={plain(then)}, now {plain(now)}"
    return "" if then == now else f"{key}={then}, now {now}"


def plain(value: Any) -> Any:
    """Tuples as lists, all the way down."""
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def data_record(corpus: Corpus) -> dict[str, Any]:
    """What a checkpoint says of the data that it was made with."""
    return {
        "name": corpus.name,
        "sha256": {name: split.sha256 for name, split in corpus.splits.items()},
    }
