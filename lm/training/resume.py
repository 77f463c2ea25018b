"""Where a stage begins: its own checkpoint, the stage before it, given weights, or nothing."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from lm.config.schema import Config, ConfigError, UserError
from lm.machine.files import check_folder, explained, remove_unfinished
from lm.model.checkpoint import CheckpointError, DamagedError, load_checkpoint, stage_of
from lm.schedule import Stage
from lm.training.progress import say
from lm.training.saving import check_room, finished, write_state

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
    """What a stage begins from; plain values, so that the first process can tell the others.

    Attributes:
        kind: finished (there is nothing to do), resume (the stage's own checkpoint: weights,
            optimiser and counters go on), weights (those of another checkpoint) or scratch.
        path: of the checkpoint; empty if there is none.
        said: the same in words.
        damaged: checkpoints of the stage that were found damaged, to be set aside.
    """

    kind: str
    path: str = ""
    said: str = "from random weights"
    damaged: tuple[str, ...] = ()


def check_places(config: Config) -> None:
    """Refuse folders and files that cannot be used, before anything takes time.

    Raises:
        ConfigError: naming the key.
    """
    if config.init_from not in ("", "scratch") and not Path(config.init_from).is_file():
        raise ConfigError(
            f"init_from={config.init_from}: no such checkpoint file; expected the path of one, "
            "scratch, or nothing for the stage before"
        )
    check_folder(f"runs_dir={config.runs_dir}", run_folder(config))


def run_folder(config: Config) -> Path:
    """Where a run keeps its stages; trial runs have a place of their own."""
    folder = Path(config.runs_dir) / config.name
    return folder / "trial" if config.throwaway else folder


def stage_folder(config: Config, number: int) -> Path:
    """Where one stage keeps its files."""
    return run_folder(config) / f"stage{number}"


def plan_start(config: Config, stage: Stage, corpus: Corpus, init_from: str) -> Start:
    """Decide where a stage begins. Nothing is changed on the disk.

    Args:
        config: of the run.
        stage: to be trained.
        corpus: that it will be trained on.
        init_from: where its weights come from, as in `Config`.

    Raises:
        UserError: if what it should begin from is missing, unfinished, damaged or another's.
    """
    folder = stage_folder(config, stage.number)
    damaged: tuple[str, ...] = ()
    if not (config.overwrite or config.throwaway):
        path, own, damaged = newest_checkpoint(folder / "checkpoints")
        if own is not None:
            refuse_other_run(own, config, stage, corpus, folder)
            if finished(own):
                text = f"holds step {own['step']} of {stage.steps}, best BPC {own['bpc']:.4f}"
                return Start("finished", str(path), f"{folder} {text}")
            return Start("resume", str(path), f"from its own step {own['step']}", damaged)
    if init_from == "scratch" or (stage.number == 1 and not init_from):
        return Start("scratch")
    if init_from:
        path, weights = Path(init_from), load_checkpoint(Path(init_from))
    else:
        path, weights = previous_stage(config, stage)
    refuse_other_model(weights, config, path)
    return Start("weights", str(path), f"from the weights in {path} (step {weights['step']})")


def prepare_folder(config: Config, stage: Stage, start: Start) -> None:
    """Make the stage's folder ready for what was planned.

    Raises:
        UserError: if it cannot be written, or the checkpoints will not fit.
    """
    folder = stage_folder(config, stage.number)
    checkpoints = folder / "checkpoints"
    if start.kind != "finished":
        check_room(folder, config.model, stage)
    with explained(folder):
        if folder.exists() and (config.overwrite or config.throwaway):
            shutil.rmtree(folder)
        checkpoints.mkdir(parents=True, exist_ok=True)
        for text in start.damaged:
            path = Path(text)
            path.replace(path.with_suffix(".damaged"))
            say(f"warning: {path} is damaged; going on from {start.path}", aside=True)
    for part in (folder, checkpoints):
        remove_unfinished(part)
    if start.kind in ("finished", "resume"):
        write_state(folder, load_checkpoint(Path(start.path)))


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any] | None, tuple[str, ...]]:
    """The last whole checkpoint of a stage, if there is one, and damaged ones that come after it.

    Raises:
        CheckpointError: if there are only damaged ones, or one of another format.
    """
    damaged: dict[str, str] = {}
    for name in ("last.ckpt", "previous.ckpt"):
        path = folder / name
        if path.exists():
            try:
                return path, load_checkpoint(path), tuple(damaged)
            except DamagedError as error:
                damaged[str(path)] = str(error)
    if damaged:
        reasons = "; ".join(damaged.values())
        raise CheckpointError(f"{reasons}; overwrite=true starts the stage again")
    return folder / "last.ckpt", None, ()


def previous_stage(config: Config, stage: Stage) -> tuple[Path, dict[str, Any]]:
    """The best weights of the stage before this one, which has to be finished."""
    number = stage.number - 1
    checkpoints = stage_folder(config, number) / "checkpoints"
    command = f"python train.py name={config.name} stage={number}"
    _, last, _ = newest_checkpoint(checkpoints)
    if last is None:
        raise UserError(
            f"stage={stage.number} begins from stage {number}'s best weights, and {checkpoints} "
            f"has none; make them with: {command} (with this run's other settings), or give "
            "init_from=PATH or init_from=scratch"
        )
    if not finished(last):
        raise UserError(
            f"stage={stage.number} begins from stage {number}'s best weights, and stage {number} "
            f"is at step {last['step']} of {stage_of(last).steps}; go on with: {command} (with "
            f"this run's other settings), or give init_from={checkpoints / 'best.ckpt'}"
        )
    return checkpoints / "best.ckpt", load_checkpoint(checkpoints / "best.ckpt")


def refuse_other_run(
    found: Mapping[str, Any], config: Config, stage: Stage, corpus: Corpus, folder: Path
) -> None:
    """A stage goes on only with the model, schedule, seed and data that it began with."""
    pairs = {
        "stage": (found["stage"], dataclasses.asdict(stage)),
        "model": (found["model"], dataclasses.asdict(config.model)),
        "seed": (found["config"].get("seed"), config.seed),
        "optim": (found["config"].get("optim"), dataclasses.asdict(config.optim)),
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
