"""Which bytes sample number i of a stage is: a pure function, so that nothing has to be stored.

The crop of a sample depends on (seed, stage, sample) alone: not on batch size, number of
processes, nor on what was read before (random crops of the stage's length, a default of ours).
"""

import numpy as np
from jaxtyping import UInt8

from data.errors import DataError

_WORD = 1 << 64


def crop_start(seed: int, stage: int, sample: int, positions: int) -> int:
    """A start, exactly uniform over range(positions).

    Philox, a counter-based generator, keyed by (seed, stage), with the sample number as the upper
    words of its counter. Its raw 64-bit words are used, which NumPy keeps the same for ever.

    Raises:
        ValueError: an argument is negative or beyond 64 bits, or `positions` is below 1.
    """
    for name, value in (("seed", seed), ("stage", stage), ("sample", sample)):
        if not 0 <= value < _WORD:
            raise ValueError(f"{name}={value}: expected 0 <= {name} < 2**64")
    if not 1 <= positions < _WORD:
        raise ValueError(f"positions={positions}: expected 1 <= positions < 2**64")
    words = np.random.Philox(key=seed + stage * _WORD, counter=sample * _WORD)
    # Words above the last multiple of `positions` would favour small starts.
    limit = _WORD - _WORD % positions
    while (word := int(words.random_raw())) >= limit:
        pass
    return word % positions


def read_batch(
    text: UInt8[np.ndarray, "bytes"],
    seed: int,
    stage: int,
    first_sample: int,
    count: int,
    length: int,
) -> UInt8[np.ndarray, "count length_and_next"]:
    """Samples first_sample .. first_sample + count - 1, each `length` bytes and the next one.

    Args:
        text: one split, of at least length + 1 bytes.
        seed: of the run.
        stage: its number.
        first_sample: number of the first sample within the stage.
        count: samples, at least 1.
        length: positions that predict, at least 1.

    Returns:
        [count, length + 1], a copy.

    Raises:
        DataError: the text is too short.
        ValueError: another argument is out of its range.
    """
    if count < 1 or length < 1:
        raise ValueError(f"count={count}, length={length}: expected at least 1")
    positions = len(text) - length
    if positions < 1:
        raise DataError(
            f"the text has {len(text)} bytes, a sample of length {length} needs {length + 1}"
        )
    batch = np.empty((count, length + 1), np.uint8)
    for row in range(count):
        start = crop_start(seed, stage, first_sample + row, positions)
        batch[row] = text[start : start + length + 1]
    return batch
