"""The training step: loss, gradients, clipping, and what a resume has to restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from data.batches import read_batch
from lm.config.schema import OptimConfig
from lm.measuring.bpc import Score, summed_tensor
from lm.model.language_model import LanguageModel
from lm.schedule import Stage
from lm.training.nonfinite import NonFiniteError, first_gradient, first_output
from lm.training.optimizer import build_optimizer, set_learning_rate
from lm.training.signals import Stop


class Crops(IterableDataset[Tensor]):
    """The micro-batches of one process, from a given step on, without end.

    Sample number = step * batch + place in the batch; places go to micro-batches, and inside each
    to the processes, in order. So what is read at a step does not depend on how many processes
    share it, and a resume needs no stored position.
    """

    def __init__(
        self,
        text: np.ndarray,
        stage: Stage,
        *,
        seed: int,
        first_step: int,
        micro_batch: int,
        rank: int,
        world: int,
    ) -> None:
        self.text = text
        self.stage = stage
        self.seed = seed
        self.first_step = first_step
        self.micro_batch = micro_batch
        self.rank = rank
        self.world = world

    def __iter__(self) -> Iterator[Tensor]:
        places = range(
            self.rank * self.micro_batch, self.stage.batch, self.micro_batch * self.world
        )
        for step in range(self.first_step, self.stage.steps):
            for place in places:
                yield torch.from_numpy(
                    read_batch(
                        self.text,
                        self.seed,
                        self.stage.number,
                        step * self.stage.batch + place,
                        self.micro_batch,
                        self.stage.sequence,
                    )
                )


class TrainingModule(pl.LightningModule):
    """Trains a `LanguageModel` through one stage.

    A step has three parts. While losses and gradients are computed, nothing changes that a
    checkpoint holds. Then the update and the *border* after it (validation, numbers, saving: see
    the callbacks) happen behind `stop.hold()`; the last callback calls `finish_border`.

    Attributes:
        step: optimiser steps of the stage that are done, also across resumes; the learning rate,
            the data and the random numbers of a step are functions of it.
        updating: weights or counters are being changed: the state is not to be saved now.
        train_score: losses since they were last reported, of all processes.
        reported: they have been reported in this border.
        validation: result of a validation at this very step, else None.
        border_pending: the step is done, but not all that happens after it.
        bad_steps, bad_in_a_row: steps dropped because a number was not finite.
    """

    def __init__(
        self,
        model: LanguageModel,
        stage: Stage,
        optim: OptimConfig,
        text: np.ndarray,
        *,
        seed: int,
        micro_batch: int,
        stop: Stop | None = None,
        resume: Mapping[str, Any] | None = None,
        optimizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        self.optim = optim
        self.text = text
        self.seed = seed
        self.micro_batch = micro_batch
        self.stop = stop or Stop()
        self.scaler_state = resume["scaler"] if resume else None
        self.optimizer_state = optimizer_state
        self.step: int = resume["step"] if resume else 0
        counters = resume["counters"] if resume else {}
        self.bad_steps: int = counters.get("bad_steps", 0)
        self.bad_in_a_row: int = counters.get("bad_in_a_row", 0)
        self.train_score = Score(counters.get("nats", 0.0), counters.get("count", 0))
        self.grad_norm: float = counters.get("grad_norm", float("nan"))
        self.border_pending = bool(counters.get("border_pending", False))
        self.reported = False
        self.validation: Score | None = None
        self.updating = False
        self._micro = 0
        self._step_nats = torch.zeros((), dtype=torch.float64)
        self._tokens: Tensor | None = None

    @property
    def between_steps(self) -> bool:
        """Whether the last optimiser step is complete and the next one has not begun."""
        return self._micro == 0

    def counters(self) -> dict[str, float]:
        """What is counted from step to step, for the checkpoint."""
        return {
            "bad_steps": self.bad_steps,
            "bad_in_a_row": self.bad_in_a_row,
            "border_pending": self.border_pending,
            "grad_norm": self.grad_norm,
            "nats": self.train_score.nats,
            "count": self.train_score.count,
        }

    def finish_border(self) -> None:
        """Note that all that follows a step has been done."""
        self.border_pending = False
        if self.reported:
            self.train_score = Score()
        self.reported = False

    def setup(self, stage: str) -> None:
        """Restore the fp16 scaler, which Lightning's precision plugin owns."""
        if self.scaler_state:
            self.trainer.precision_plugin.load_state_dict(self.scaler_state)

    def configure_optimizers(self) -> Optimizer:
        """AdamW, with the state that the run begins from, if there is one."""
        scaled = self.trainer.precision == "16-mixed"
        optimizer = build_optimizer(self.model, self.optim, self.stage, fused=not scaled)
        if self.optimizer_state is not None:
            optimizer.load_state_dict(dict(self.optimizer_state))
        return optimizer

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Micro-batches as they are: reading is a slice of a memory map, no workers needed."""
        crops = Crops(
            self.text,
            self.stage,
            seed=self.seed,
            first_step=self.step,
            micro_batch=self.micro_batch,
            rank=self.global_rank,
            world=self.trainer.world_size,
        )
        return DataLoader(crops, batch_size=None)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """Mean loss, in nats per character, of one micro-batch."""
        self.stop.check()
        self._reseed()
        self._tokens = tokens = batch.int()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())
        self._step_nats += loss.detach().double().cpu() * tokens[:, 1:].numel()
        self._micro += 1
        return loss

    def _reseed(self) -> None:
        """Make the coming random numbers a function of where the run is, and of nothing else."""
        key = (self.seed, self.stage.number, self.step, self._micro, self.global_rank)
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, and give the update the learning rate of its place in the stage.

        A step whose loss or gradient is not finite is dropped. It keeps its place in the data and
        in the learning-rate schedule: without gradients AdamW changes nothing, neither weights nor
        its own state.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        nats = summed_tensor(self._step_nats)
        finite = bool(torch.isfinite(norm) and torch.isfinite(nats))
        if not finite and self.bad_in_a_row + 1 >= self.optim.max_bad_steps:
            raise NonFiniteError(self._non_finite())
        if finite and self.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optim.clip, norm)
        self.stop.hold()
        self.updating = True
        self.grad_norm = float(norm)
        set_learning_rate(optimizer, self.learning_rate)
        if finite:
            self.bad_in_a_row = 0
            self.train_score += Score(float(nats), self.stage.batch * self.stage.sequence)
        else:
            self.bad_steps += 1
            self.bad_in_a_row += 1
            optimizer.zero_grad(set_to_none=True)

    def _non_finite(self) -> str:
        """What is not finite, and in which layer it begins, as far as this process can tell."""
        assert self._tokens is not None
        with self.trainer.precision_plugin.forward_context():
            place = first_output(self.model, self._tokens[:, :-1])
        place = place or first_gradient(self.model) or "a loss of another micro-batch"
        return (
            f"step {self.step + 1} of stage {self.stage.number}: loss or gradient not finite, "
            f"{self.bad_in_a_row + 1} steps in a row; it begins in {place}"
        )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """One step, with what is counted after it."""
        super().optimizer_step(*args, **kwargs)
        # Lightning would keep the gradients through the next forward pass, when memory peaks.
        self.model.zero_grad()
        self._step_nats.zero_()
        self._micro = 0
        self.step += 1
        self.border_pending = True
        self.updating = False

    @property
    def learning_rate(self) -> float:
        """Of the coming step."""
        return self.stage.learning_rate(self.step)
