"""The planner: what it counts is what autograd keeps, and its commands say what they should."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from lm.config.checks import schedule_of
from lm.costs.flops import visible_pairs
from lm.costs.gpu_rates import GPUS, Cut
from lm.costs.memory import (
    Memory,
    kept_around_blocks,
    kept_by_block,
    matrix_parameters,
    step_memory,
)
from lm.machine.device import Device
from lm.model.language_model import (
    SYMBOLS,
    LanguageModel,
    ModelConfig,
    bands,
    parameters,
)
from lm.plan import calibration as calibrate
from lm.plan import check as plan_check
from lm.plan import planner as plan
from lm.schedule import Stage
from lm.training import summary as announce

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
    assert memory(config, 1, heap=True).heap > 0
    assert memory(config, 5, heap=True).heap == whole.heap == 0
    one, two = (memory(config, 5, sequences=n, program=0) for n in (1, 2))
    assert two.activations == 2 * one.activations
    assert two.logits == 2 * one.logits


def test_gaps_are_counted_for_small_pieces_only(compose):
    """With 8,192 positions, 512 floats each are below 32 MiB, and 2,048 numbers of bf16 not."""
    config = compose()

    def heap(sequences):
        return memory(config, 1, compute=2, sequences=sequences, heap=True).heap

    one, four = (kept_by_block(config.model, 2048, n, 512, compute=2) for n in (1, 4))
    assert four.inner == 2 * 8192 * 2048 * 2
    assert heap(1) == 3 * (one.activations + one.attention)
    assert heap(4) == 3 * (four.activations - four.inner + four.attention)
    assert heap(8) == 0


def seconds(config, number, *, pieces=1, checkpointing=False, share=0.4):
    gpu = dataclasses.replace(GPUS["H100"], share=share)
    stage = schedule_of(config)[number]
    return gpu.step_time(config.model, stage, Cut(1, pieces, checkpointing), Memory(weights=4))


def test_time_follows_the_work(compose):
    config = compose()
    one = seconds(config, 1)
    assert seconds(config, 1, pieces=4).total == pytest.approx(4 * one.total, rel=1e-6)
    assert seconds(config, 1, share=0.2).dense == pytest.approx(2 * one.dense)
    assert seconds(config, 1, checkpointing=True).attention == pytest.approx(one.attention * 4 / 3)
    assert seconds(config, 5).attention > 50 * one.attention


@pytest.fixture
def quick(monkeypatch):
    """What is measured is small."""
    for name, value in {"POSITIONS": 32, "LENGTH": 64, "WINDOW": 16, "FRESH": 2**16}.items():
        monkeypatch.setattr(calibrate, name, value)


def test_a_step_is_put_together_from_measured_parts(compose, monkeypatch):
    config = compose("model=tiny", "schedule=tiny")
    known = calibrate.Calibration(config.model, Device("cpu", "a processor", "32-true", 1e11))
    monkeypatch.setattr(calibrate.Calibration, "_passes", lambda *_: calibrate.Passes(2.0, 3.0))
    known.measured["pair"] = {w: calibrate.Passes(w, 2 * w) for w in (8, 16, 32, 64, 96, 128)}
    known.__dict__.update(
        seconds_per_flop=1e-3, seconds_per_parameter=5.0, seconds_per_fresh_byte=7.0
    )
    stage = dataclasses.replace(
        schedule_of(config)[1], sequence=100, windows=(8, 16, 32, 64, 96, 128)
    )
    memory = Memory(gradients=4 * 11, activations=1, attention=2, logits=4, positions=8)
    time = known.step_time(config.model, stage, Cut(2, 3, True), memory)
    # Six blocks of 2 + 2 + 3 seconds and 2 + 3 around them, for 200 positions at once.
    projected = 4 * 2 * 192**2 * (9 + 17 + 33 + 65 + 97 + 100) * 1e-3
    assert time.dense == pytest.approx(3 * (6 * 7 + 5 + projected))
    pairs = sum(
        window * 4 * visible_pairs(100, window, stride)
        for window, strides in zip(stage.windows, stage.strides, strict=True)
        for stride in strides
    )
    assert time.attention == pytest.approx(3 * 2 * pairs)
    assert time.memory == 3 * 7 * 7
    assert time.update == 11 * 5
    assert time.total == time.dense + time.attention + time.memory + time.update


def test_parts_are_measured_on_this_device(compose, quick):
    model = compose("model=tiny", "model.dropout=0.1").model
    known = calibrate.Calibration(model, Device("cpu", "a processor", "bf16-mixed", 1e11))
    assert known.block(32).forward > 0 and known.block(32).backward > 0
    assert known.around(32).step(True) > known.around(32).step(False) > 0
    assert known.pair(16).step(False) >= 0
    assert "torch.mm 100 (bf16-mixed)" in known.lines()[0]
    assert known.lines()[1].endswith(" (32)")


def test_the_command_prints_all_stages_on_this_device(quick, capsys, compose):
    plan.main(["experiment=demo"])
    plans, measured = capsys.readouterr().out.split("\n\n")
    weights = parameters(compose("experiment=demo").model)
    assert f"1 device(s), {weights:,} parameters" in plans
    assert [line.split()[0] for line in plans.splitlines()[2:8]] == ["1", "2", "3", "4", "5", "all"]
    assert measured.startswith("measured, GFLOP/s: torch.mm")


def test_named_devices_take_this_ones_place(capsys):
    devices = ["--device", "A100", "--device", "H200"]
    plan.main(["experiment=enwik8_small", *devices, "trainer.devices=4"])
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("A100 SXM 80 GB: 4 device(s), 41,083,136 parameters")
    assert second.startswith("H200 SXM 141 GB: 4 device(s)")
    assert [line.split()[0] for line in first.splitlines()[2:8]] == ["1", "2", "3", "4", "5", "all"]


def test_energy_is_power_times_hours_and_json_holds_it_all(capsys):
    plan.main(["stage=2", "--device", "H200", "--share", "0.4", "--json", "trainer.devices=2"])
    (named,) = json.loads(capsys.readouterr().out)
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


def test_a_run_says_what_memory_it_takes_and_warns(compose, monkeypatch):
    config = compose("trainer.micro_batch=8")
    device = Device("cpu", "a processor", "32-true", 1e11)
    first = schedule_of(config)[1]
    for left, said in ((1e12, 1), (1e6, 2)):
        monkeypatch.setattr(announce, "memory_left", lambda _, left=left: left)
        lines = list(announce.memory_lines(config, first, device, 8))
        assert len(lines) == said
        peak = float(lines[0].removeprefix("  about ").split()[0])
        assert peak * 1e9 > memory(config, 1, sequences=8).total
    assert lines[1].startswith("  warning: that is more than the ")


def test_estimates_are_set_beside_measurements(monkeypatch, capsys):
    answers = iter([(1.0, 0.8, 1200, 1100), (1.0, 0.7, 1200, 1100), (1.0, 1.0, 1200, 1000)])
    monkeypatch.setattr(plan_check, "compare", lambda _: plan_check.Comparison(*next(answers)))
    plan_check.main(["--case", "tiny-2", "--case", "tiny-3", "--case", "small-3"])
    *_, first, _, _, said = capsys.readouterr().out.splitlines()
    assert first.split() == ["tiny-2", "1.000", "0.800", "1.25", "0.00", "0.00", "1.09"]
    assert said == "1 of 3 within 25% of the time and 15% of the memory"


@pytest.mark.slow
@pytest.mark.parametrize("case", plan_check.CASES)
def test_memory_is_estimated_within_15_percent(case):
    found = plan_check.compare(plan_check.CASES[case])
    assert found.bytes == pytest.approx(found.measured_bytes, rel=plan_check.MEMORY)
