"""The preset of the paper's small model as it is shipped, smaller only in size, over a border."""

from __future__ import annotations

from pathlib import Path

from lm.model.checkpoint import load_checkpoint
from tests.system.micro import outcome, preset
from tests.system.trial import Nursery, Trial


def test_the_shipped_preset_resumes_exactly_over_a_border(tmp_path: Path, nursery: Nursery) -> None:
    undisturbed, disturbed = (preset(tmp_path / name) for name in ("undisturbed", "disturbed"))
    assert nursery.run(Trial(str(tmp_path / "undisturbed"), shipped=True)) == [0]
    reached = []
    # In the middle of a step of stage 1, then, counted from there, between two steps of stage 2.
    for call in (4, 7):
        fault = ("lm.training.module", "TrainingModule.training_step", call, "terminate")
        trial = Trial(str(tmp_path / "disturbed"), faults=[fault], shipped=True)
        assert nursery.run(trial) == [143], trial.log.read_text()
        last = sorted(Path(disturbed.runs_dir).rglob("last.ckpt"))[-1]
        found = load_checkpoint(last)
        reached.append((found["stage"]["number"], found["step"]))
    assert nursery.run(Trial(str(tmp_path / "disturbed"), shipped=True)) == [0]
    assert outcome(disturbed) == outcome(undisturbed)
    assert len(outcome(disturbed)) == 8
    assert reached == [(1, 1), (2, 1)]
