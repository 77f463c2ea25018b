"""The stages are the paper's, number by number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config.checks import check_train, schedule_of
from lm.config.schema import ConfigError
from lm.schedule import ScheduleError, StageTable, build_schedule, by_layer, head_strides

# Sequence, windows of the six groups, learning rate, batch, steps of small and of large.
PAPER = [
    (2048, (32, 64, 128, 256, 384, 512), 2.5e-4, 32, 430_000, 350_000),
    (4096, (64, 128, 256, 512, 768, 1024), 1.25e-4, 32, 50_000, 25_000),
    (8192, (128, 256, 512, 1024, 1536, 2048), 6.25e-5, 16, 50_000, 10_000),
    (16384, (256, 512, 1024, 2048, 3072, 4096), 3.125e-5, 16, 35_000, 5_000),
    (23040, (512, 1024, 2048, 4096, 6144, 8192), 1.5625e-5, 16, 5_000, 5_000),
]


@pytest.mark.parametrize("size", ["small", "large"])
def test_the_five_stages_of_both_models(size, compose):
    config = compose(f"experiment=enwik8_{size}")
    schedule = schedule_of(config)
    layers = {"small": 12, "large": 30}[size]
    assert len(schedule) == 5
    for number, (sequence, windows, lr, batch, *steps) in enumerate(PAPER, start=1):
        stage = schedule[number]
        assert stage.number == number
        assert (stage.sequence, stage.batch, stage.lr) == (sequence, batch, lr)
        assert stage.steps == steps[size == "large"]
        assert stage.windows == tuple(w for w in windows for _ in range(layers // 6))
        assert stage.warmup == min(10_000, stage.steps // 10)
        for layer, strides in enumerate(stage.strides):
            assert strides == (1,) * 6 + (paper_stride(layer, layers),) * 2


def paper_stride(layer, layers):
    """Listed dilation + 1: none in the lower half, then 1, 2 and 3 by sixths."""
    return max(1, layer * 6 // layers - 1)


def test_mean_window_and_receptive_fields(compose):
    schedule = schedule_of(compose("experiment=enwik8_small"))
    assert sum(schedule[1].windows) / 12 == pytest.approx(229.3, abs=0.05)
    fields = [stage.receptive_field for stage in schedule.stages]
    assert fields == [7_872, 15_744, 31_488, 62_976, 125_952]
    assert [schedule[k].reach for k in (1, 2, 3, 4)] == [2048, 4096, 8192, 16384]
    assert schedule[5].reach == 32_768


def test_learning_rate_is_linear_then_constant(compose):
    stage = schedule_of(compose("experiment=enwik8_small"))[5]
    assert stage.warmup == 500
    assert stage.learning_rate(0) == pytest.approx(stage.lr / 500)
    assert stage.learning_rate(249) == pytest.approx(stage.lr / 2)
    assert stage.learning_rate(499) == stage.learning_rate(4_999) == stage.lr


def test_a_stage_without_warmup_starts_at_its_rate():
    table = {"1": StageTable(sequence=8, windows=[2], lr=0.5, batch=1, steps=3)}
    stage = build_schedule(table, strides=[1], dilated_heads=0, layers=1, heads=1)[1]
    assert stage.warmup == 0
    assert stage.learning_rate(0) == 0.5


@given(layers=st.integers(1, 60), groups=st.integers(1, 12))
def test_layers_are_shared_equally_or_refused(layers, groups):
    values = list(range(groups))
    if layers % groups:
        with pytest.raises(ScheduleError, match="windows: .* groups cannot share"):
            by_layer(values, layers, "windows")
    else:
        spread = by_layer(values, layers, "windows")
        assert len(spread) == layers
        assert list(spread) == sorted(spread)
        assert all(spread.count(v) == layers // groups for v in values)


def test_the_last_heads_are_the_dilated_ones():
    assert head_strides(4, heads=8, dilated_heads=2) == (1, 1, 1, 1, 1, 1, 4, 4)
    assert head_strides(4, heads=2, dilated_heads=0) == (1, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stage=6", "stage=6: this schedule has the stages 1 to 5"),
        ("stage=0", "stage=0: this schedule has the stages 1 to 5"),
        ("stage=one", "stage=one: expected 1 to 5, or all"),
        ("schedule.dilated_heads=9", "schedule.dilated_heads=9: expected 0 to 8"),
        ("schedule.strides=[1,2,3,4,5]", "schedule.strides: 5 groups cannot share 12 layers"),
        ("schedule.strides=[0]", "schedule.strides=0: expected at least 1"),
        ("schedule.stages.2.windows=[-1]", "schedule.stages.2.windows=-1: expected at least 0"),
        ("schedule.stages.2.windows=[]", "schedule.stages.2.windows: 0 groups cannot share"),
        ("schedule.stages.3.batch=0", "schedule.stages.3.batch=0: expected at least 1"),
        ("schedule.stages.3.lr=nan", "schedule.stages.3.lr=nan: expected more than 0"),
        ("schedule.warmup_fraction=2", "schedule.warmup_fraction=2.0: expected between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(override, message, compose):
    with pytest.raises(ConfigError) as caught:
        check_train(compose(override))
    assert str(caught.value).startswith(message)


def test_stages_are_numbered_without_a_gap():
    table = StageTable(sequence=8, windows=[2], lr=0.5, batch=1, steps=3)
    with pytest.raises(ScheduleError, match=r"found the keys \[1, 3\]"):
        build_schedule({"1": table, "3": table}, strides=[1], dilated_heads=0, layers=1, heads=1)


WINDOWS = st.lists(st.integers(0, 50), min_size=1, max_size=3)
STEPS = st.integers(1, 10**6)


@given(
    windows=WINDOWS,
    strides=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dilated=st.integers(0, 4),
    steps=st.lists(STEPS, min_size=1, max_size=4),
    fraction=st.floats(0, 1),
    most=st.integers(0, 10**5),
    step=STEPS,
)
@settings(max_examples=50)
def test_any_schedule_reaches_as_far_as_its_heads_and_warms_up_once(
    windows, strides, dilated, steps, fraction, most, step
):
    table = {str(k): StageTable(8, windows, 1e-3 / k, 2, n) for k, n in enumerate(steps, start=1)}
    schedule = build_schedule(
        table,
        strides=strides,
        dilated_heads=dilated,
        layers=6,
        heads=4,
        warmup_fraction=fraction,
        warmup_max=most,
    )
    assert [stage.number for stage in schedule.stages] == list(range(1, len(steps) + 1))
    for stage, count in zip(schedule.stages, steps, strict=True):
        reaches = [
            max(window * stride for stride in layer)
            for window, layer in zip(stage.windows, stage.strides, strict=True)
        ]
        assert (stage.receptive_field, stage.reach) == (sum(reaches), max(reaches))
        assert stage.characters == count * 2 * 8
        assert 0 <= stage.warmup <= min(most, count)
        rate = stage.learning_rate(step)
        assert 0 < rate <= stage.learning_rate(step + 1) <= stage.lr
        assert (rate == stage.lr) == (step + 1 >= stage.warmup)
