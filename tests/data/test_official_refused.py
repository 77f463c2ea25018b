"""What is not enwik8 or text8 is refused with the reason, or taken with a warning if allowed."""

import contextlib
import dataclasses
import gzip
import hashlib
import lzma
import os
from pathlib import Path

import pytest

from data import prepare
from data.corpus import DataError, open_corpus
from data.official import OFFICIAL
from tests.data.helpers import as_somebody_else, content, names, zipped


@contextlib.contextmanager
def offline(monkeypatch):
    """Inside, a download is an error of the test."""

    def download(*_):
        raise AssertionError("tried to download")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "download", download)
        yield


def test_a_web_page_is_named_until_the_right_file_is_there(root, mini_enwik8, monkeypatch):
    (root / "enwik8.zip").write_bytes(b"<!DOCTYPE html><html>403 Forbidden</html>")
    with offline(monkeypatch):
        for _ in range(2):
            with pytest.raises(
                DataError, match=r"enwik8\.zip is an HTML page \(starts with '<!DOC"
            ):
                open_corpus("enwik8", root)
            assert names(root) == {"enwik8.zip"}
        (root / "enwik8.zip").write_bytes(zipped("enwik8", mini_enwik8))
        assert content(open_corpus("enwik8", root)) == mini_enwik8


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("enwik8", lambda text: text[:-1], "size 999, expected 1000; 0 CR LF pairs found"),
        ("enwik8", lambda text: text + b"x", "size 1001, expected 1000; 0 CR LF pairs found"),
        ("enwik8", lambda text: b"\r\n" * 7 + text, "size 1014, expected 1000; 7 CR LF pairs"),
        ("enwik8", lambda text: b"", "size 0, expected 1000"),
        ("enwik8", lambda text: text[::-1], "sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"),
        ("enwik8.zip", lambda text: zipped("enwik8", text)[:600], "truncated or damaged zip"),
        ("enwik8.zip", lambda text: b"BZh9" + text, r"holds no zip, gzip or xz data .*BZh9"),
        ("enwik8.gz", lambda text: gzip.compress(text[:-1]), "size 999, expected 1000"),
        ("enwik8.gz", lambda text: gzip.compress(text * 5), "size more than 1000, expected 1000"),
        ("enwik8.xz", lambda text: lzma.compress(text[::-1]), "sha256"),
        ("enwik8.zip", lambda text: zipped("enwik8", text[::-1]), "sha256"),
    ],
)
def test_a_wrong_file_is_refused_and_nothing_stays(
    root, mini_enwik8, monkeypatch, name, make, message
):
    text = mini_enwik8.replace(b"\r\n", b"\r\r")
    monkeypatch.setitem(
        OFFICIAL,
        "enwik8",
        dataclasses.replace(OFFICIAL["enwik8"], sha256=hashlib.sha256(text).hexdigest()),
    )
    (root / name).write_bytes(make(text))
    with offline(monkeypatch), pytest.raises(DataError, match=message) as raised:
        open_corpus("enwik8", root)
    assert str(root / name) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert names(root) == {name}


@pytest.mark.parametrize("size", [99_999_999, 100_000_001])
def test_the_real_size_is_checked_to_the_byte(root, size):
    with (root / "enwik8").open("wb") as file:
        file.truncate(size)
    with pytest.raises(DataError, match=f"size {size}, expected 100000000; 0 CR LF pairs found"):
        open_corpus("enwik8", root)


def test_nonstandard_text_is_taken_when_allowed(root, mini_enwik8):
    (root / "enwik8").write_bytes(mini_enwik8[:200])
    with pytest.warns(
        UserWarning, match=r"enwik8: NOT the standard text \(size 200, expected 1000"
    ):
        corpus = open_corpus("enwik8", root, allow_nonstandard=True)
    assert [(split.start, split.stop) for split in corpus.splits.values()] == [
        (0, 180),
        (180, 190),
        (190, 200),
    ]
    assert "NOT the standard text" in corpus.describe()[0]
    with pytest.raises(DataError, match="size 200"):
        open_corpus("enwik8", root)


def test_what_was_unpacked_by_permission_is_refused_without(root, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8[:200]))
    with pytest.warns(UserWarning, match="NOT the standard"):
        open_corpus("enwik8", root, allow_nonstandard=True)
    with pytest.raises(DataError, match="size 200, expected 1000"):
        open_corpus("enwik8", root)


def test_even_allowed_archives_have_a_limit(root, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(bytes(10_001)))
    with pytest.raises(DataError, match="size more than 10000"):
        open_corpus("enwik8", root, allow_nonstandard=True)
    assert names(root) == {"enwik8.gz"}


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("pack", [lambda text: text, gzip.compress])
def test_a_foreign_symbol_in_text8_is_named(root, mini_text8, allow, pack):
    text = mini_text8[:123] + "É".encode() + mini_text8[125:]
    (root / "text8").write_bytes(pack(text))
    for _ in range(2):
        with pytest.raises(DataError, match="text8: byte 0xC3 at offset 123 is no symbol of text8"):
            open_corpus("text8", root, allow_nonstandard=allow)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("gone"), os.mkfifo])
def test_what_is_no_file_is_refused(root, mini_enwik8, make):
    make(root / "enwik8")
    with pytest.raises(
        DataError, match=r"enwik8(: No such file| is a folder| is not a regular file)"
    ):
        open_corpus("enwik8", root)


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(DataError, match="is a file, expected a folder"):
        open_corpus("enwik8", tmp_path / "root")


def test_a_root_that_cannot_be_looked_into_is_named(root, tmp_path, mini_enwik8):
    root.chmod(0o700 if os.getuid() == 0 else 0)
    try:
        with (
            as_somebody_else(tmp_path),
            pytest.raises(DataError, match=r"cannot read .*/root: Permission denied"),
        ):
            open_corpus("enwik8", root)
    finally:
        root.chmod(0o700)


def test_an_unreadable_file_is_refused(root, tmp_path, mini_enwik8):
    (root / "enwik8").write_bytes(mini_enwik8)
    (root / "enwik8").chmod(0)
    with (
        as_somebody_else(tmp_path),
        pytest.raises(DataError, match=r"cannot read .*enwik8: Permission denied"),
    ):
        open_corpus("enwik8", root)
