from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import pytest
import torch

from lm.config.command_schemas import SampleConfig
from lm.config.schema import ConfigError, UserError
from lm.inference.sampling import Printer, choose, generate, sample_command
from lm.model.single_step import Stepper
from lm.model.stream import StreamState
from tests.lm.evaluation_cases import (
    random_text,
    save_run,
    tiny_model,
    tokens_of,
    unigram_model,
)

ROOT = Path(__file__).parents[3]


def test_greedy_text_is_what_whole_forward_passes_choose() -> None:
    model, text = tiny_model(), random_text(50)
    made = list(generate(model, text.tobytes(), 8, temperature=0))
    whole = tokens_of(text)
    with torch.inference_mode():
        for _ in range(8):
            whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], dim=1)
    assert made == whole[0, 50:].tolist()


def test_the_seed_decides() -> None:
    model = tiny_model()
    texts = [list(generate(model, b"ab", 12, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_callers_random_numbers_stay_untouched() -> None:
    model = tiny_model()
    before = torch.get_rng_state()
    list(generate(model, b"ab", 5))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_prompt_begins_after_a_newline() -> None:
    model = tiny_model()
    assert list(generate(model, b"", 10)) == list(generate(model, b"\n", 10))
    assert list(generate(model, b"", 0)) == []


def test_bytes_come_as_often_as_they_are_likely() -> None:
    model = unigram_model({65: 1, 66: 2, 67: 3})
    logits = Stepper(StreamState(model)).step(0)
    generator = torch.Generator().manual_seed(0)
    made = [choose(logits, 1.0, 0, generator) for _ in range(4000)]
    assert abs(made.count(65) / 4000 - 0.5) < 0.03
    assert abs(made.count(66) / 4000 - 0.25) < 0.03
    assert set(generate(model, b"x", 30, top_k=2)) == {65, 66}


def test_temperature_and_top_k() -> None:
    logits = torch.full((256,), -10.0)
    logits[[3, 4]] = torch.tensor([1.0, 1.5])
    generator = torch.Generator().manual_seed(0)
    assert choose(logits, 0, 0, generator) == 4
    assert {choose(logits, 1.0, 1, generator) for _ in range(20)} == {4}
    assert {choose(logits, 0.02, 0, generator) for _ in range(50)} == {4}
    assert {choose(logits, 1.0, 0, generator) for _ in range(50)} >= {3, 4}
    assert len({choose(logits, 50.0, 0, generator) for _ in range(50)}) > 20


@pytest.mark.parametrize(
    ("encoding", "data", "shown"),
    [
        ("utf-8", "né\n\tb".encode(), "né\n\tb"),
        ("ascii", "né".encode(), "n\\xe9"),
        ("ascii", "\u20ac\U0001f600".encode(), "\\u20ac\\U0001f600"),
        ("utf-8", b"a\x00\x1b[31m\r\x7f", "a\\x00\\x1b[31m\\r\\x7f"),
        ("utf-8", b"\xff\xc3", "\\xff\\xc3"),
        ("latin-1", "\u202e\xa0".encode(), "\\u202e\\xa0"),
    ],
)
def test_any_bytes_show_on_any_terminal(encoding: str, data: bytes, shown: str) -> None:
    for size in (1, len(data)):
        printer = Printer(encoding)
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        text = "".join(printer.text(piece) for piece in pieces) + printer.text(b"", final=True)
        assert text == shown
    Printer(encoding).text(bytes(range(256)), final=True).encode(encoding)


def test_the_command_prints_escaped_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path, tiny_model(), random_text(500))
    monkeypatch.chdir(tmp_path)
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    prompt = " d\u00e9f (x, {y}): ${z} \udcff"
    monkeypatch.setattr(sys, "argv", ["sample.py", "run=x", f"prompt={prompt}", "length=40"])
    runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    printed = terminal.getvalue().decode("ascii")
    assert " d\\xe9f (x, {y}): ${z} \\xff" in printed

    sample_command(SampleConfig(run="x", prompt=prompt, length=40, output="made"))
    made = (tmp_path / "made").read_bytes()
    raw = prompt.encode("utf-8", "surrogateescape")
    assert made == raw + bytes(generate(tiny_model(), raw, 40))
    (tmp_path / "p").write_bytes(raw)
    sample_command(SampleConfig(run="x", prompt_file="p", length=40, output="again"))
    assert (tmp_path / "again").read_bytes() == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "length=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"prompt": "a", "prompt_file": "b"}, "give one of them"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample_command(SampleConfig(**({"run": "x"} | changes)))  # type: ignore[arg-type]


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompt_file=nowhere: No such file"):
        sample_command(SampleConfig(run="x", prompt_file="nowhere"))
