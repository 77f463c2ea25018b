"""The stream's cost is measured over the same characters as the plain passes'."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm.measuring import stream_cost as measure_stream
from lm.model.language_model import LanguageModel
from tests.lm.evaluation_cases import STAGE, random_text, save_run, tiny_model


def test_both_ways_read_the_same_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny_model().eval(), random_text(4 * 16 + 1)
    read: list[int] = []
    forward = LanguageModel.forward

    def noted(self: LanguageModel, tokens, *rest, **options):
        read.append(tokens.numel())
        return forward(self, tokens, *rest, **options)

    scored: list[int] = []
    monkeypatch.setattr(LanguageModel, "forward", noted)
    monkeypatch.setattr(measure_stream, "stream", lambda _, t, **__: scored.append(len(t) - 1))
    found = measure_stream.compare(model, text, 16, chunk=8, rounds=2)
    assert read == [16] * 4 * 3
    assert scored == [64] * 3
    assert found.characters == 64
    assert found.stream > 0 < found.plain


def test_the_command_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path, tiny_model(), random_text(4000))
    measure_stream.main(["x", "--characters", "150", "--rounds", "1", "--threads", "1"])
    whole = 150 // STAGE.sequence * STAGE.sequence
    assert f": {whole} characters, 1 threads: stream " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: --characters 1: found room for no sequence"):
        measure_stream.main(["x", "--characters", "1"])
