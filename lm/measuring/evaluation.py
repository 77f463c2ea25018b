"""One evaluation, from the command's configuration to a line of JSON that can be quoted."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Integer
from torch import Tensor

from lm.config.command_schemas import NEWLINE, ComputeConfig, EvalConfig, check_eval, merged_data
from lm.config.corpus import corpus_of
from lm.errors import ConfigError
from lm.inference.trained_model import autocast, compute_device, open_model, open_source
from lm.machine.cluster import seat_from_environment
from lm.machine.device import Device
from lm.machine.files import check_folder
from lm.measuring.bpc import Tally
from lm.measuring.curves import Point, context_curve, context_edges, curve_of
from lm.measuring.evaluation_record import (
    keep,
    make_record,
    opening,
    protocol_notes,
    results_folder,
    say,
)
from lm.measuring.protocols import Grid, score_windows, share, stream
from lm.measuring.scored_text import Selection, corpus_difference, select
from lm.model.checkpoint import stage_of
from lm.model.language_model import LanguageModel

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class Team:
    """The processes that share the work, and the device of this one."""

    device: torch.device
    rank: int = 0
    world: int = 1


class WatchedTally(Tally):
    """A tally that says on the first process, every so many seconds, how far it is."""

    def __init__(self, targets: int, every: float = 10.0, **options: Any) -> None:
        super().__init__(**options)
        self.targets = targets
        self.every = every
        self.start = self.last = time.perf_counter()

    def add(
        self,
        nats: Float64[Tensor, "batch positions"],
        targets: Integer[Tensor, "batch positions"],
        context: range,
    ) -> None:
        """Count, and speak if it is time to."""
        super().add(nats, targets, context)
        now = time.perf_counter()
        done = self.score.count + self.ignored
        if now - self.last >= self.every and self.score.count:
            self.last = now
            left = (now - self.start) * (self.targets - done) / done
            sys.stderr.write(
                f"{done:,} of {self.targets:,} characters, {self.score.bpc:.4f} BPC so far, "
                f"about {left:,.0f} s left\n"
            )


def evaluate_command(config: EvalConfig) -> dict[str, Any] | None:
    """Run one evaluation: print it, keep it; returns the result on the first process.

    Raises:
        UserError, DataError, BackendError: if what was asked for does not fit.
    """
    check_eval(config)
    device = compute_device(config.trainer)
    source = open_source(config)
    if folder := results_folder(config, source):
        check_folder(f"results={config.results}" if config.results else "runs_dir", folder)
    corpus = corpus_of(merged_data(source.checkpoint["config"]["data"], config.data))
    difference = corpus_difference(source, corpus)
    stage = stage_of(source.checkpoint)
    selection = select(corpus, config, stage.receptive_field)
    team = launch(config.trainer, device)
    model = open_model(source, device, config.backend).to(team.device)
    notes = [difference] if difference else []
    notes += protocol_notes(config, stage)
    if team.rank == 0:
        say("\n".join(opening(config, source, selection, notes)))
    start = time.perf_counter()
    with torch.inference_mode(), autocast(device):
        tally = measure(config, model, selection, team)
        seconds = time.perf_counter() - start
        curves = {"position": curve_of(tally)}
        if config.curves.contexts:
            curves["context"] = curve_by_context(config, model, selection, team)
    if team.rank:
        return None
    record = make_record(config, source, model, device, corpus, selection, tally, seconds, notes)
    keep(config, source, record, curves)
    return record


def launch(config: ComputeConfig, device: Device) -> Team:
    """Start the other processes, which run the same command line, and join them."""
    if config.devices * config.nodes == 1:
        return Team(torch.device(device.kind))
    from lightning_fabric import Fabric

    # Refuses other numbers of processes than there are, for which Fabric would wait for ever.
    seat_from_environment(config.devices, config.nodes)
    fabric: Fabric = Fabric(
        accelerator=device.kind, devices=config.devices, num_nodes=config.nodes, strategy="ddp"
    )
    fabric.launch()
    return Team(fabric.device, fabric.global_rank, fabric.world_size)


def measure(config: EvalConfig, model: LanguageModel, selection: Selection, team: Team) -> Tally:
    """Score the selection by the protocol; the tally counts for all processes together."""
    text, context = selection.text, selection.context
    longest = len(text) if config.protocol == "stream" else config.window
    tally = WatchedTally(
        -(-selection.targets // team.world),
        every=10.0 if team.rank == 0 else float("inf"),
        left_out=NEWLINE if config.newlines == "skip" else None,
        edges=context_edges(longest),
    )
    if config.protocol == "stream":
        stream(
            model,
            text,
            context=context,
            chunk=config.chunk,
            device=team.device,
            rank=team.rank,
            world=team.world,
            tally=tally,
        )
    else:
        grid = Grid(len(text), context, config.window, config.step, config.protocol == "paper")
        windows = grid.windows(share(len(grid), team.rank, team.world))
        score_windows(
            model,
            text,
            windows,
            tally,
            batch=config.batch,
            chunk=config.chunk,
            device=team.device,
        )
    tally.sum_over_processes()
    return tally


def curve_by_context(
    config: EvalConfig, model: LanguageModel, selection: Selection, team: Team
) -> list[Point]:
    """The second curve of `lm.measuring.curves`."""
    try:
        return context_curve(
            model,
            selection.text,
            config.curves.contexts,
            context=selection.context,
            blocks=config.curves.blocks,
            block=config.curves.block,
            left_out=NEWLINE if config.newlines == "skip" else None,
            chunk=config.chunk,
            device=team.device,
            rank=team.rank,
            world=team.world,
        )
    except ValueError as error:
        raise ConfigError(f"curves.contexts={config.curves.contexts}: {error}") from None
