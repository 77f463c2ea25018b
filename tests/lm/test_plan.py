"""The planner: what it counts is what autograd keeps, and its commands say what they should."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from lm import measure_step, plan
from lm.check import schedule_of
from lm.costs import kept_around_blocks, kept_by_block, matrix_parameters, step_memory
from lm.model import SYMBOLS, LanguageModel, ModelConfig, bands, parameters
from lm.rates import GPUS, step_time
from lm.schedule import Stage

SEQUENCES, SEQUENCE, WINDOW = 2, 96, 16
LAYER_INDICES = 76  # bytes of three small index tensors that a layer with strides keeps


def stage(layers: int) -> Stage:
    strides = ((1, 1, 1, 2),) * layers
    return Stage(1, SEQUENCE, (WINDOW,) * layers, strides, 1e-3, SEQUENCES, 1, 0)


def kept_by_autograd(model: LanguageModel, mixed: bool) -> int:
    """Bytes of all tensors that a forward pass keeps, weights and buffers left out."""
    own = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.randint(0, 256, (SEQUENCES, SEQUENCE + 1)).int()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())
    return sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in kept.items()
        if pointer not in known
    )


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_counted_is_what_autograd_keeps(mixed, dropout, layers):
    config = ModelConfig(
        layers=layers, heads=4, width=64, feedforward=256, dropout=dropout, backend="tvm"
    )
    compute = 2 if mixed else 4
    block = kept_by_block(config, SEQUENCE, SEQUENCES, WINDOW, compute)
    positions = SEQUENCES * SEQUENCE
    counted = layers * (block.activations + block.attention)
    counted += kept_around_blocks(config, positions, compute).activations
    counted += positions * (SYMBOLS * 4 + 8)  # log-softmax and targets
    counted += matrix_parameters(config) * 2 if mixed else 0
    counted += (2 * WINDOW + 1) * 64 * 4 if dropout else 0  # the table after dropout
    model = LanguageModel(config, bands(stage(layers)))
    assert kept_by_autograd(model, mixed) == pytest.approx(counted, abs=layers * LAYER_INDICES)


def memory(config, number, **options):
    chosen = {"sequences": 1, "compute": 4, "checkpointing": True}
    return step_memory(
        config.model,
        schedule_of(config)[number],
        parameters=parameters(config.model),
        **chosen | options,
    )


def test_memory_by_kind(compose):
    config = compose()
    whole = memory(config, 5, program=7)
    assert whole.weights == whole.gradients == whole.optimiser / 2 == 41_083_136 * 4
    assert whole.total == sum(vars(whole).values())
    assert whole.total < memory(config, 5, checkpointing=False).total / 3
    assert whole.total < 6e9
    one, two = (memory(config, 5, sequences=n, program=0) for n in (1, 2))
    assert two.activations == 2 * one.activations
    assert two.logits == 2 * one.logits


def seconds(config, number, **options):
    chosen = {"sequences": 1, "pieces": 1, "checkpointing": False, "parameters": 0, "kept": 0}
    return step_time(config.model, schedule_of(config)[number], GPUS["H100"], **chosen | options)


def test_time_follows_the_work(compose):
    config = compose()
    one = seconds(config, 1)
    assert seconds(config, 1, pieces=4).total == pytest.approx(4 * one.total)
    assert seconds(config, 1, share=0.425).dense == pytest.approx(2 * one.dense)
    assert seconds(config, 1, checkpointing=True).attention == pytest.approx(one.attention * 4 / 3)
    assert seconds(config, 5).attention > 50 * one.attention


def test_the_command_prints_all_stages_here_and_on_a_named_device(capsys):
    plan.main(["experiment=enwik8_small", "--device", "A100", "trainer.devices=4"])
    here, named = capsys.readouterr().out.split("\n\n")
    assert "41,083,136 parameters" in here
    assert named.startswith("A100 SXM 80 GB: 4 device(s)")
    assert [line.split()[0] for line in named.splitlines()[2:8]] == ["1", "2", "3", "4", "5", "all"]


def test_energy_is_power_times_hours_and_json_holds_it_all(capsys):
    plan.main(["stage=2", "--device", "H200", "--share", "0.4", "--json", "trainer.devices=2"])
    _, named = json.loads(capsys.readouterr().out)
    assert named["stage"] == 2
    assert named["characters"] == 50_000 * 32 * 4096
    assert named["kilowatt_hours"] == pytest.approx(named["hours"] * 2 * 0.7)
    assert named["devices"] * named["sequences"] * named["pieces"] == 32


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trainer.devices=3"], "trainer.devices=3"),
        (["trainer.nosuch=1"], "trainer.nosuch"),
        (["trainer.precision=32-true", "--device", "H100"], "trainer.precision=32-true"),
    ],
)
def test_mistakes_are_one_line(arguments, named):
    with pytest.raises(SystemExit) as end:
        plan.main(arguments)
    assert str(end.value).startswith("error: ") and named in str(end.value)
    assert "\n" not in str(end.value)


ALL = "trainer.gradient_checkpointing=false"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "model=tiny schedule=tiny stage=1 trainer.micro_batch=8",
        f"model=tiny schedule=tiny stage=2 trainer.micro_batch=4 {ALL}",
        f"stage=1 trainer.micro_batch=1 trainer.precision=32-true {ALL}",
        "stage=1 trainer.micro_batch=1 trainer.precision=32-true",
        f"stage=1 trainer.micro_batch=2 {ALL}",
        "stage=2 trainer.micro_batch=1 model.dropout=0",
    ],
)
def test_memory_is_estimated_within_15_percent(compose, overrides):
    arguments = overrides.split()
    config = compose(*arguments)
    cost = measure_step.measure_apart(arguments, steps=1, profiled=False)
    estimate = memory(
        config,
        int(config.stage),
        sequences=cost.sequences,
        compute=4 if cost.precision == "32-true" else 2,
        checkpointing=cost.gradient_checkpointing,
        program=cost.program_bytes + plan.FIRST_STEP,
    )
    assert estimate.total == pytest.approx(cost.peak_bytes, rel=0.15)
