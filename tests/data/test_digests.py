"""One pass over a file: ranges, digests, symbols, CR LF pairs, foreign bytes."""

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import digests as module
from data.digests import FRACTIONS, count_crlf, cut, digest_of, first_outside, scan
from data.errors import DataError

SHARES = st.lists(st.floats(1e-6, 1), min_size=1, max_size=5)


@given(size=st.integers(0, 10**18), shares=SHARES)
def test_ranges_cover_the_file_once(size, shares):
    edges = cut(size, [share / sum(shares) for share in shares])
    assert edges[0] == 0
    assert edges[-1] == size
    assert len(edges) == len(shares) + 1
    assert all(start <= stop for start, stop in pairwise(edges))
    for (start, stop), share in zip(pairwise(edges), shares, strict=True):
        assert abs((stop - start) - size * share / sum(shares)) <= 1 + 1e-9 * size


def test_decimal_fractions_are_exact():
    assert cut(100_000_000, FRACTIONS) == (0, 90_000_000, 95_000_000, 100_000_000)
    assert cut(10**18 + 1, FRACTIONS)[1:] == (9 * 10**17, 95 * 10**16, 10**18 + 1)
    assert cut(10, (0.1, 0.2, 0.7)) == (0, 1, 3, 10)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 7)


def test_scan(tmp_path, small_chunks):
    text = bytes(range(100)) + b"ab" * 20 + b"\x00\xff"
    path = tmp_path / "text"
    path.write_bytes(text)
    edges = (0, 100, 100, 140, 142)
    facts = scan(path, edges)
    parts = [text[start:stop] for start, stop in pairwise(edges)]
    assert facts.sha256 == hashlib.sha256(text).hexdigest() == digest_of(path)
    assert facts.digests == tuple(hashlib.sha256(part).hexdigest() for part in parts)
    assert facts.symbols == (bytes(range(100)), b"", b"ab", b"\x00\xff")
    assert facts.size == 142


@pytest.mark.parametrize(("edges", "word"), [((0, 5, 11), "shorter"), ((0, 9), "longer")])
def test_scan_notices_another_size(tmp_path, edges, word):
    path = tmp_path / "text"
    path.write_bytes(bytes(10))
    with pytest.raises(DataError, match=f"text became {word}"):
        scan(path, edges)


@given(text=st.text("\r\nx", max_size=60))
def test_crlf_pairs_across_chunks(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "crlf"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 3)
        assert count_crlf(path) == text.encode().count(b"\r\n")


def test_the_first_foreign_byte(tmp_path, small_chunks):
    path = tmp_path / "text"
    path.write_bytes(b"abc " * 10 + b"b\xc3\x89a!")
    assert first_outside(path, b"abc ") == (41, 0xC3)
    assert first_outside(path, b"abc !\xc3\x89") is None


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*gone: No such file"):
        digest_of(tmp_path / "gone")
