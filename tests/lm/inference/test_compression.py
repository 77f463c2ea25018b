from __future__ import annotations

import hashlib
import math
import runpy
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.config.command_schemas import CompressConfig, ComputeConfig
from lm.config.schema import ConfigError, UserError
from lm.inference.compression import (
    CHECK,
    HEADER,
    CompressError,
    compress,
    compress_command,
    decompress,
    read_header,
)
from lm.measuring.protocols import stream
from lm.model.language_model import LanguageModel
from tests.lm.evaluation_cases import random_text, save_run, tiny_model, unigram_model

ROOT = Path(__file__).parents[3]
SETTING = "cpu, 1 threads; torch 2"


def back(model: LanguageModel, blob: bytes) -> bytes:
    return decompress(model, blob, SETTING, name="file")


def coded_bits(blob: bytes) -> int:
    return 8 * (len(blob) - HEADER.size - len(SETTING) - CHECK.size)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\xff", b"ab", bytes(range(256)), bytes(range(256))[::-1] + b"\n\r\n" * 20],
)
def test_round_trips_bit_for_bit(data: bytes) -> None:
    model = tiny_model()
    assert back(model, compress(model, data, SETTING)) == data


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (tiny_model(), random_text(500)),
        (unigram_model({97: 0.01, 98: 9}), np.full(700, 97, np.uint8)),
        (unigram_model({97: 1, 98: 2, 99: 12}), np.frombuffer(b"abaabac" * 100, np.uint8)),
    ],
)
def test_size_is_the_streams_number(model: LanguageModel, text: np.ndarray) -> None:
    blob = compress(model, text.tobytes(), SETTING)
    assert back(model, blob) == text.tobytes()
    # The first byte has no prediction and takes 8 bits.
    expected = 8 + stream(model, text).nats / math.log(2)
    assert abs(coded_bits(blob) - expected) <= 0.002 * expected + 8 * 8


def test_a_byte_that_the_model_excludes_can_be_coded() -> None:
    model = unigram_model({97: 1e-9})
    data = b"a" * 50 + b"z" + b"a" * 50
    assert back(model, compress(model, data, SETTING)) == data


def test_another_model_setting_or_format_is_refused() -> None:
    model = tiny_model()
    blob = compress(model, b"some text", SETTING)
    with pytest.raises(CompressError, match="file was made by the model"):
        back(tiny_model(seed=1), blob)
    with pytest.raises(CompressError, match=r"made with cpu, 1 .* read with cpu, 2 .*threads="):
        decompress(model, blob, SETTING.replace("1", "2"), name="file")
    # Another version of torch may well round alike; if not, the content's sha256 tells.
    assert decompress(model, blob, SETTING + ".99", name="file") == b"some text"
    with pytest.raises(CompressError, match="not a compressed file of this version"):
        back(model, b"some text")
    with pytest.raises(CompressError, match="not a compressed file"):
        back(model, b"")


def test_the_bands_belong_to_the_model() -> None:
    """Another stage of the same weights predicts otherwise."""
    from dataclasses import replace

    from tests.lm.evaluation_cases import STAGE

    blob = compress(tiny_model(), b"some text", SETTING)
    with pytest.raises(CompressError, match="file was made by the model"):
        back(tiny_model(replace(STAGE, windows=(3, 4, 6))), blob)


def test_any_damage_is_found() -> None:
    model, data = tiny_model(), b"some text that will be damaged"
    blob = compress(model, data, SETTING)
    for index in range(len(blob)):
        broken = bytearray(blob)
        broken[index] ^= 1 << index % 8
        with pytest.raises(CompressError, match=r"damaged|not a compressed file"):
            read_header(bytes(broken), "file")
    for size in range(len(blob)):
        with pytest.raises(CompressError, match=r"damaged|not a compressed file"):
            read_header(blob[:size], "file")
    with pytest.raises(CompressError, match="damaged"):
        read_header(blob + b"\x00", "file")


def test_arithmetic_that_differs_gives_an_error_and_no_text() -> None:
    model = tiny_model()
    blob = compress(model, random_text(60).tobytes(), SETTING)
    original = model.head.forward

    def rounding(x: torch.Tensor) -> torch.Tensor:
        return original(x) * (1 + 2e-3)

    model.head.forward = rounding  # type: ignore[method-assign]
    with pytest.raises(CompressError, match="rounds differently"):
        back(model, blob)


def test_a_false_content_hash_is_found() -> None:
    model = tiny_model()
    blob = compress(model, b"text", SETTING)
    body = blob[: -CHECK.size].replace(
        hashlib.sha256(b"text").digest(), hashlib.sha256(b"tent").digest()
    )
    with pytest.raises(CompressError, match="not what went in"):
        back(model, body + CHECK.pack(zlib.crc32(body)))


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(CompressError, match="not finite"):
        compress(model, b"ab", SETTING)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_run(tmp_path, tiny_model(), random_text(500))
    save_run(tmp_path, tiny_model(seed=1), random_text(500), name="y")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compress.py", *arguments])
    runpy.run_path(str(ROOT / "compress.py"), run_name="__main__")


def test_the_command_goes_there_and_back(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, data = home / "a, b=(c).txt", random_text(120).tobytes()
    source.write_bytes(data)
    run(monkeypatch, "compress", "run=x", f"input={source.name}", "output=small")
    printed = capsys.readouterr().out
    assert f"120 bytes <-> {(home / 'small').stat().st_size} bytes" in printed
    assert "kB a minute" in printed
    run(monkeypatch, "run=x", "input=small", "decompress", "output=back")
    assert (home / "back").read_bytes() == data


def test_two_words_for_what_to_do_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="error: compress, decompress: found both"):
        run(monkeypatch, "compress", "run=x", "decompress", "input=a", "output=b")


def test_what_fails_leaves_no_file(home: Path) -> None:
    (home / "text").write_bytes(b"some text")
    compress_command(CompressConfig(run="x", action="compress", input="text", output="small"))
    wrong = CompressConfig(run="y", action="decompress", input="small", output="back")
    with pytest.raises(CompressError, match="small was made by the model"):
        compress_command(wrong)
    (home / "broken").write_bytes((home / "small").read_bytes()[:-9])
    with pytest.raises(CompressError, match="broken: damaged or cut short"):
        compress_command(
            CompressConfig(run="x", action="decompress", input="broken", output="back")
        )
    for changes, message in (
        ({"backend": "loop"}, "backend=loop: compression has one way of computing"),
        ({"trainer": ComputeConfig(threads=2)}, r"made with cpu, 1 threads.* read with cpu, 2"),
        ({"trainer": ComputeConfig(precision="bf16-mixed")}, "trainer.precision=bf16-mixed"),
        ({"trainer": ComputeConfig(devices=2)}, "trainer.devices=2: this command uses one"),
    ):
        config = CompressConfig(
            **({"run": "x", "action": "decompress", "input": "small", "output": "back"} | changes)
        )
        with pytest.raises(UserError, match=message):
            compress_command(config)
    with pytest.raises(ConfigError, match=r"output=text: exists"):
        compress_command(CompressConfig(run="x", action="compress", input="text", output="text"))
    assert not (home / "back").exists()
    assert (home / "text").read_bytes() == b"some text"
    assert not list(home.glob(".*unfinished"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": ""}, "expected python compress.py compress or decompress"),
        ({"input": ""}, "input: no value given"),
        ({"output": ""}, "output: no value given"),
        ({"input": "nowhere"}, "input=nowhere: No such file"),
    ],
)
def test_wrong_values_are_refused(home: Path, changes: dict[str, object], message: str) -> None:
    values = {"run": "x", "action": "compress", "input": "x.txt", "output": "o"} | changes
    with pytest.raises(ConfigError, match=message):
        compress_command(CompressConfig(**values))  # type: ignore[arg-type]
