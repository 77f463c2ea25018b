"""A file turned by a model into an arithmetic-coded one, and back, bit for bit.

The size of such a file is a proof of the model's number of bits per character: decoding needs
nothing but the model. The first byte is coded with 8 bits, each later one with the model's
probabilities after all before it.

Both directions run the same steps, one character at a time (lm.model.single_step), since a forward
pass of another shape rounds differently, and one different bit in a probability would garble all
that follows. For the same reason device and thread count are recorded and have to be the same.

A compressed file, integers little-endian::

    magic       8 bytes: "longchar" with its last letter replaced by the format's number
    model       sha256 of the model (lm.inference.trained_model.model_sha256)
    content     sha256 of the original
    length      8 bytes: of the original
    setting     1 byte of length, then text: device, threads; version of torch
    coded       what the range coder made
    check       4 bytes: CRC-32 of all before it
"""

from __future__ import annotations

import hashlib
import struct
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from constriction import stream as coding
from jaxtyping import Float32
from rich.console import Console
from rich.progress import track

from lm.config.command_schemas import CompressConfig, check_compress
from lm.config.schema import ConfigError, UserError
from lm.inference.trained_model import compute_device, model_sha256, open_model, open_source
from lm.machine.device import Device
from lm.machine.files import check_file, replacing
from lm.model.language_model import SYMBOLS, LanguageModel
from lm.model.single_step import Stepper
from lm.model.stream import StreamState

MAGIC = b"longcha2"
HEADER = struct.Struct("<8s32s32sQB")
CHECK = struct.Struct("<I")
WORD = np.dtype("<u4")


class CompressError(UserError):
    """A compressed file that cannot be read back; the message says why."""


@dataclass(frozen=True)
class Header:
    """What a compressed file says of itself."""

    model: bytes
    content: bytes
    length: int
    setting: str


class Predictor:
    """The model's probabilities of the next byte, one character at a time."""

    def __init__(self, model: LanguageModel) -> None:
        self.stepper = Stepper(StreamState(model))

    def after(self, byte: int | None) -> Float32[np.ndarray, " 256"]:
        """Probabilities of the byte that follows `byte`; None: of the first byte, uniform."""
        if byte is None:
            return np.full(SYMBOLS, 1 / SYMBOLS, dtype=np.float32)
        return self.stepper.step(byte).softmax(-1).cpu().numpy()


def compress(model: LanguageModel, data: bytes, setting: str, *, watch: bool = False) -> bytes:
    """The compressed file's bytes.

    Args:
        model: in evaluation mode.
        data: what is compressed.
        setting: from `setting_of`.
        watch: show a progress bar, where there is a terminal.
    """
    encoder, predictor, before = coding.queue.RangeEncoder(), Predictor(model), None
    for byte in _watched(data, len(data), watch):
        encoder.encode(byte, _distribution(predictor.after(before)))
        before = byte
    content = hashlib.sha256(data).digest()
    words = setting.encode()
    head = HEADER.pack(MAGIC, bytes.fromhex(model_sha256(model)), content, len(data), len(words))
    body = head + words + encoder.get_compressed().astype(WORD).tobytes()
    return body + CHECK.pack(zlib.crc32(body))


def decompress(
    model: LanguageModel, blob: bytes, setting: str, *, name: str, watch: bool = False
) -> bytes:
    """The original bytes of the compressed file `name`, verified.

    Raises:
        CompressError: for a file that is damaged, of another model or setting, or whose content
            comes out different because this machine rounds differently.
    """
    header, coded = read_header(blob, name)
    if header.model.hex() != (here := model_sha256(model)):
        raise CompressError(
            f"{name} was made by the model {header.model.hex()[:16]}, this one is {here[:16]}; "
            "use the checkpoint that it was made with"
        )
    if header.setting.partition(";")[0] != setting.partition(";")[0]:
        raise CompressError(
            f"{name} was made with {header.setting}; here it would be read with {setting}, whose "
            "rounding may differ; use the same trainer.threads= and trainer.accelerator="
        )
    decoder, predictor = coding.queue.RangeDecoder(coded), Predictor(model)
    data, before = bytearray(), None
    for _ in _watched(range(header.length), header.length, watch):
        distribution = _distribution(predictor.after(before))
        try:
            before = int(decoder.decode(distribution))
        except AssertionError as error:  # what the coder raises for words that nothing encodes to
            raise _garbled(name, header.setting) from error
        data.append(before)
    if hashlib.sha256(data).digest() != header.content:
        raise _garbled(name, header.setting)
    return bytes(data)


def _garbled(name: str, setting: str) -> CompressError:
    return CompressError(
        f"{name}: what comes out is not what went in, though file and model are the right ones: "
        f"this machine rounds differently from the one where it was made ({setting}; here torch "
        f"{torch.__version__})"
    )


def read_header(blob: bytes, name: str) -> tuple[Header, np.ndarray]:
    """What a compressed file says of itself, and its coded words.

    Raises:
        CompressError: if it is damaged, or no such file.
    """
    if blob[: len(MAGIC)] != MAGIC:
        raise CompressError(
            f"{name}: not a compressed file of this version (it begins with "
            f"{blob[: len(MAGIC)]!r}, expected {MAGIC!r})"
        )
    body, check = blob[: -CHECK.size], blob[-CHECK.size :]
    if len(body) < HEADER.size or CHECK.unpack(check)[0] != zlib.crc32(body):
        raise CompressError(f"{name}: damaged or cut short, its checksum does not match")
    _, model, content, length, size = HEADER.unpack_from(body)
    start = HEADER.size + size
    try:
        header = Header(model, content, length, body[HEADER.size : start].decode())
        return header, np.frombuffer(body[start:], dtype=WORD).astype(np.uint32)
    except ValueError as error:
        raise CompressError(f"{name}: damaged, {error}") from error


def setting_of(device: Device) -> str:
    """What decides how the arithmetic rounds; up to the semicolon it has to be the same."""
    return f"{device.kind}, {torch.get_num_threads()} threads; torch {torch.__version__}"


def compress_command(config: CompressConfig) -> None:
    """Compress or decompress a file.

    Raises:
        UserError, BackendError: if what was asked for does not fit; then nothing is written.
    """
    check_compress(config)
    source, target = Path(config.input), Path(config.output)
    if target.exists() and not config.overwrite:
        raise ConfigError(f"output={target}: exists; choose another, or overwrite=true")
    check_file(f"output={target}", target)
    try:
        data = source.read_bytes()
    except OSError as error:
        raise ConfigError(f"input={source}: {error.strerror}") from error
    if config.action == "decompress":
        read_header(data, str(source))
    device = compute_device(config.trainer)
    model = open_model(open_source(config), device, config.backend)
    setting = setting_of(device)
    start = time.perf_counter()
    if config.action == "compress":
        result = compress(model, data, setting, watch=True)
    else:
        result = decompress(model, data, setting, name=str(source), watch=True)
    seconds = time.perf_counter() - start
    with replacing(target) as file:
        file.write(result)
    original, small = (data, result) if config.action == "compress" else (result, data)
    sys.stdout.write(_summary(original, small, seconds) + "\n")


def _summary(original: bytes, small: bytes, seconds: float) -> str:
    around = HEADER.size + small[HEADER.size - 1] + CHECK.size
    text = f"{len(original):,} bytes <-> {len(small):,} bytes"
    if original:
        text += (
            f", {8 * len(small) / len(original):.4f} bits per character "
            f"({8 * (len(small) - around) / len(original):.4f} without header and checksum)"
        )
    return f"{text}; {seconds:.1f} s, {60 * len(original) / 1000 / seconds:,.1f} kB a minute"


def _distribution(probabilities: Float32[np.ndarray, " 256"]) -> Any:
    if not np.isfinite(probabilities).all():
        raise CompressError("the model's probabilities are not finite; its weights are damaged")
    # Every symbol gets at least 2^-24, so any byte can be coded.
    return coding.model.Categorical(probabilities, lazy=True)


def _watched(items: Iterable[int], total: int, watch: bool) -> Iterable[int]:
    if not (watch and sys.stderr.isatty()):
        return items
    return track(items, total=total, console=Console(stderr=True), description="characters")
