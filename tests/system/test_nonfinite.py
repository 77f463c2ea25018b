"""Numbers that are not finite are counted, kept out of weights and checkpoints, and end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lm.training.callbacks
import lm.training.saving
from lm.measuring.bpc import Score
from lm.model.checkpoint import load_checkpoint
from lm.model.language_model import Block
from lm.training.module import TrainingModule
from lm.training.nonfinite import NonFiniteError, first_gradient, first_output, refuse_weights
from tests.system.micro import metrics, plain

Run = Callable[..., None]


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float, layer: int = 1) -> None:
    """Multiply the output of a layer in these steps (counted from 1)."""
    training_step, forward = TrainingModule.training_step, Block.forward
    spoiling: list[bool] = [False]

    def step(self: TrainingModule, batch: Tensor, index: int) -> Tensor:
        spoiling[0] = self.step + 1 in steps
        self.model.blocks[layer].spoiled = True
        return training_step(self, batch, index)

    def spoiled(self: Block, *args: object) -> Tensor:
        output = forward(self, *args)
        wanted = spoiling[0] and self.training and hasattr(self, "spoiled")
        return output * value if wanted else output

    monkeypatch.setattr(TrainingModule, "training_step", step)
    monkeypatch.setattr(Block, "forward", spoiled)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_steps_are_dropped_and_counted(
    value: float,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    states = {}
    save = lm.training.saving.save_checkpoint

    def note(path: Path, content: dict, keep: Path | None = None) -> None:
        if path.name == "last.ckpt":
            states[content["step"]] = plain([content["weights"], content["optimizer"]["state"]])
        save(path, content, keep)

    monkeypatch.setattr(lm.training.saving, "save_checkpoint", note)
    spoil(monkeypatch, {3, 5, 6}, value)
    run(stage="1", trainer__save_every=1, trainer__log_every=1)
    assert states[3] == states[2] != states[4]
    assert states[6] == states[5] == states[4] != states[7]
    folder = tmp_path / "runs" / "micro" / "stage1"
    rows = metrics(folder)
    assert [int(row[7]) for row in rows] == [0, 0, 1, 1, 2, 3, 3]
    assert [row[2] == "" for row in rows] == [False, False, True, False, True, True, False]
    rates = [float(row[5]) for row in rows]  # a dropped step keeps its place in the schedule
    assert rates == [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01]
    assert "3 steps dropped" in capsys.readouterr().out
    refuse_weights_in(folder)


def refuse_weights_in(folder: Path) -> None:
    for path in (folder / "checkpoints").glob("*.ckpt"):
        content = load_checkpoint(path)
        assert all(torch.isfinite(weight).all() for weight in content["weights"].values()), path


def test_too_many_in_a_row_end_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "micro" / "stage1"
    last = folder / "checkpoints" / "last.ckpt"
    with monkeypatch.context() as patch:
        spoil(patch, {1, 3, 4, 5, 6, 7}, float("nan"))
        for _ in range(2):  # again, it ends at the same place
            with pytest.raises(NonFiniteError) as error:
                run(stage="1", optim__max_bad_steps=3)
            assert str(error.value) == (
                "step 5 of stage 1: loss or gradient not finite, 3 steps in a row; it begins in "
                f"the output of layer 1; the last good checkpoint is {last} (step 4); go on from "
                "it in another run with a lower learning rate or trainer.precision=32-true: "
                f"name=NEW init_from={last}"
            )
            assert load_checkpoint(last)["counters"]["bad_steps"] == 3
            refuse_weights_in(folder)
    run(stage="1", optim__max_bad_steps=3)  # mended, it goes on
    assert load_checkpoint(last)["counters"] == load_checkpoint(last)["counters"] | {
        "bad_steps": 3,
        "bad_in_a_row": 0,
    }


def test_before_the_first_checkpoint_there_is_none_to_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {1}, float("nan"))
    with pytest.raises(NonFiniteError, match="step 1 of stage 1: .* there is no checkpoint yet"):
        run(stage="1", optim__max_bad_steps=1)
    assert not list((tmp_path / "runs" / "micro" / "stage1" / "checkpoints").iterdir())


def test_the_layer_is_found(compose_model: Callable[[], torch.nn.Module]) -> None:
    model = compose_model()
    tokens = torch.zeros(1, 8, dtype=torch.int32)
    assert first_output(model, tokens) is None and first_gradient(model) is None
    model(tokens).sum().backward()
    assert first_gradient(model) is None
    model.blocks[0].inner.weight.grad[3] = float("inf")
    model.blocks[1].attention.q.weight.grad[0, 0] = float("nan")
    assert first_gradient(model) == "the gradient of blocks.1.attention.q.weight"
    with torch.no_grad():
        model.blocks[1].attention.o.weight[0, 0] = float("nan")
    assert first_output(model, tokens) == "the output of layer 1's attention"
    assert all(not module._forward_hooks for module in model.modules())
    with pytest.raises(NonFiniteError, match=r"weights blocks.1.attention.o.weight are not"):
        refuse_weights(model)


@pytest.fixture
def compose_model() -> Callable[[], torch.nn.Module]:
    from kernels import Band
    from lm.model.language_model import LanguageModel, ModelConfig

    config = ModelConfig(layers=2, heads=2, width=32, feedforward=64, backend="dense")
    return lambda: LanguageModel(config, [Band(3, (1, 1)), Band(3, (1, 2))]).eval()


def test_a_validation_that_is_not_finite_ends_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.training.callbacks, "stream", lambda *_, **__: Score(float("nan"), 200))
    with pytest.raises(NonFiniteError, match="step 3 of stage 1: the validation's result is not"):
        run(stage="1")
    checkpoints = tmp_path / "runs" / "micro" / "stage1" / "checkpoints"
    assert load_checkpoint(checkpoints / "last.ckpt")["step"] == 3
    assert not (checkpoints / "best.ckpt").exists()


def test_weights_that_are_not_finite_are_never_saved(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = TrainingModule.optimizer_step

    def damaging(self: TrainingModule, *args: object, **kwargs: object) -> None:
        step(self, *args, **kwargs)
        if self.step == 4:
            with torch.no_grad():
                self.model.blocks[0].outer.bias[0] = float("inf")

    monkeypatch.setattr(TrainingModule, "optimizer_step", damaging)
    with pytest.raises(NonFiniteError, match=r"weights blocks.0.outer.bias are not .* \(step 3\)"):
        run(stage="1")
    refuse_weights_in(tmp_path / "runs" / "micro" / "stage1")
    checkpoints = tmp_path / "runs" / "micro" / "stage1" / "checkpoints"
    assert load_checkpoint(checkpoints / "last.ckpt")["step"] == 3
