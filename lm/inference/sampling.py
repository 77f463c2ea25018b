"""Text from a model, one character at a time behind a bounded cache."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lm.config.command_schemas import SampleConfig, check_sample
from lm.config.schema import UserError
from lm.inference.trained_model import compute_device, open_model, open_source
from lm.machine.files import check_file, replacing
from lm.model.language_model import LanguageModel
from lm.model.single_step import Stepper
from lm.model.stream import StreamState

# What a text begins after, when there is no prompt.
START = b"\n"


def generate(
    model: LanguageModel,
    prompt: bytes,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 1,
) -> Iterator[int]:
    """Byte values that continue `prompt` (a newline, if it is empty).

    Args:
        model: in evaluation mode.
        prompt: what the model reads first.
        length: how many bytes to make.
        temperature: logits are divided by it; 0: always the likeliest byte.
        top_k: choose among so many of the likeliest bytes; 0: among all.
        seed: of the choice; the same seed gives the same text.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    state = StreamState(model)
    read = np.frombuffer(prompt or START, dtype=np.uint8).astype(np.int64)
    logits = state.advance(torch.from_numpy(read).to(device)[None], len(read) - 1)[0, -1]
    stepper = Stepper(state)
    for made in range(length):
        byte = choose(logits.cpu(), temperature, top_k, generator)
        yield byte
        if made + 1 < length:
            logits = stepper.step(byte)


def choose(
    logits: Float[Tensor, " 256"], temperature: float, top_k: int, generator: torch.Generator
) -> int:
    """A byte drawn from softmax(logits / temperature), or the likeliest one at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / temperature
    if 0 < top_k < len(scaled):
        kept = scaled.topk(top_k).indices
        scaled = torch.full_like(scaled, -torch.inf).index_copy(0, kept, scaled[kept])
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))


class Printer:
    r"""Bytes as text that any terminal can show.

    What is not UTF-8, control characters, and what the terminal's encoding lacks become \ escapes:
    a sample may hold anything, also a terminal's own commands.
    """

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def text(self, data: bytes, *, final: bool = False) -> str:
        """What can be shown of all bytes so far and has not been returned yet."""
        decoded = self.decoder.decode(data, final)
        shown = "".join(
            c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii")
            for c in decoded
        )
        return shown.encode(self.encoding, "backslashreplace").decode(self.encoding)


def sample_command(config: SampleConfig) -> None:
    """Print a sample, or write it to a file.

    Raises:
        UserError, BackendError: if what was asked for does not fit.
    """
    check_sample(config)
    device = compute_device(config.trainer)
    prompt = prompt_of(config)
    if config.output:
        check_file(f"output={config.output}", Path(config.output))
    model = open_model(open_source(config), device, config.backend)
    made = generate(
        model,
        prompt,
        config.length,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    )
    if config.output:
        with replacing(Path(config.output)) as file:
            file.write(prompt + bytes(made))
        return
    printer = Printer(sys.stdout.encoding or "ascii")
    # The first byte is made before the prompt is shown: what is logged on the way stands above it.
    show(printer.text(prompt + bytes([next(made)])))
    for byte in made:
        show(printer.text(bytes([byte])))
    show(printer.text(b"", final=True) + "\n")


def show(text: str) -> None:
    """Write to the terminal at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def prompt_of(config: SampleConfig) -> bytes:
    """The prompt's bytes, as they were typed or as they stand in the file."""
    if not config.prompt_file:
        return config.prompt.encode("utf-8", "surrogateescape")
    try:
        return Path(config.prompt_file).read_bytes()
    except OSError as error:
        raise UserError(f"prompt_file={config.prompt_file}: {error.strerror}") from error
