"""The compressors beside a model are measured as they are said to be."""

import gzip
import json
import random

import pytest

from lm.measuring.compressors import COMPRESSORS, compressed_bits, stages


def test_bits_are_the_smaller_of_alone_and_appended():
    def counting(text: bytes) -> bytes:
        return bytes(100 + len(set(text)))

    assert compressed_bits(counting, b"abc", b"abd") == 8 * 1 / 3
    assert compressed_bits(counting, b"", b"ab") == 8 * 2 / 2


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressor_may_have_read_the_training_text(name):
    letters = random.Random(0)
    train = bytes(letters.randrange(256) for _ in range(20_000))
    fresh = bytes(letters.randrange(256) for _ in range(2_000))
    assert compressed_bits(COMPRESSORS[name], train, fresh) > 7.9
    if name != "bzip2 -9":  # which sorts blocks and so does not copy from far back
        assert compressed_bits(COMPRESSORS[name], train, train[-2_000:]) < 2


def test_gzip_is_the_gzip_of_the_shell():
    text = b"the same text, " * 400
    assert compressed_bits(COMPRESSORS["gzip -9"], b"", text) <= 8 * len(
        gzip.compress(text, 9)
    ) / len(text)


def test_stages_come_in_order(tmp_path):
    for number, bpc in ((2, 2.5), (1, 3.0)):
        folder = tmp_path / f"stage{number}"
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"best_bpc": bpc}))
    assert [(s["stage"], s["best_bpc"]) for s in stages(tmp_path)] == [
        ("stage1", 3.0),
        ("stage2", 2.5),
    ]
