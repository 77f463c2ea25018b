"""enwik8 and text8 found in any form, refused in any other, prepared once."""

import contextlib
import gzip
import hashlib
import io
import lzma
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from data import prepare, unpacked
from data.corpus import SPLITS, DataError, open_corpus
from data.official import OFFICIAL
from data.store import Store, private_folder


def zipped(name: str, text: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr(name, text)
    return out.getvalue()


def content(corpus) -> bytes:
    return b"".join(corpus.splits[name].read().tobytes() for name in SPLITS)


def names(folder: Path) -> set[str]:
    """What lies in the folder, records left out."""
    return {entry.name for entry in folder.iterdir() if not entry.name.endswith(".longchar.json")}


FORMS = {
    "raw": ("enwik8", lambda text: text),
    "zip": ("enwik8.zip", lambda text: zipped("enwik8", text)),
    "zip with a folder inside": ("enwik8.zip", lambda text: zipped("data/sets/enwik8", text)),
    "gz": ("enwik8.gz", gzip.compress),
    "xz": ("enwik8.xz", lzma.compress),
    "zip called gz": ("enwik8.gz", lambda text: zipped("enwik8", text)),
    "xz without a suffix": ("enwik8", lzma.compress),
    "raw called zip": ("enwik8.zip", lambda text: text),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_found(root, mini_enwik8, form):
    name, pack = FORMS[form]
    (root / name).write_bytes(pack(mini_enwik8))
    corpus = open_corpus("enwik8", root)
    assert content(corpus) == mini_enwik8
    assert [len(corpus.splits[name]) for name in SPLITS] == [900, 50, 50]
    assert corpus.symbols == len(set(mini_enwik8[:900]))
    for split in corpus.splits.values():
        assert split.sha256 == hashlib.sha256(mini_enwik8[split.start : split.stop]).hexdigest()
        assert not split.read().flags.writeable
        assert isinstance(split.read(), np.memmap)


def test_splits_edged_by_spaces_keep_them(root, mini_text8):
    (root / "text8").write_bytes(mini_text8)
    corpus = open_corpus("text8", root)
    assert content(corpus) == mini_text8
    assert [split.read()[0] for split in corpus.splits.values()] == [ord(" ")] * 3
    assert corpus.symbols == 27


def test_the_description_says_all(root, mini_enwik8):
    (root / "enwik8").write_bytes(mini_enwik8)
    corpus = open_corpus("enwik8", root)
    lines = "\n".join(corpus.describe())
    assert f"the standard text, 1000 bytes, sha256 {OFFICIAL['enwik8'].sha256}" in lines
    test = corpus.splits["test"]
    assert f"test: 50 bytes [950, 1000) of {root}/enwik8, sha256 {test.sha256}" in lines
    assert f"symbols in train: {corpus.symbols} of 256" in lines


def test_the_published_numbers():
    for corpus in OFFICIAL.values():
        assert corpus.size == 100_000_000
        assert corpus.url == f"https://mattmahoney.net/dc/{corpus.name}.zip"


def test_a_read_only_root_sends_texts_to_the_cache(root, tmp_path, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8))
    root.chmod(0o555)
    for _ in range(2):
        corpus = open_corpus("enwik8", root)
        assert content(corpus) == mini_enwik8
        assert corpus.splits["train"].path.parent == tmp_path / "cache"
    assert [entry.name for entry in root.iterdir()] == ["enwik8.gz"]


def test_a_raw_text_in_a_read_only_root_stays_there(root, tmp_path, mini_enwik8):
    (root / "enwik8").write_bytes(mini_enwik8)
    root.chmod(0o555)
    assert open_corpus("enwik8", root).splits["train"].path == root / "enwik8"
    assert names(tmp_path / "cache") == set()


def count_calls(monkeypatch, module, name) -> list:
    calls, plain = [], getattr(module, name)

    def counted(*arguments):
        calls.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize("closed", [False, True])
def test_the_second_opening_reads_nothing(root, mini_enwik8, monkeypatch, closed):
    (root / "enwik8.zip").write_bytes(zipped("enwik8", mini_enwik8))
    if closed:
        root.chmod(0o555)
    first = open_corpus("enwik8", root)
    import data.verify

    for module, name in ((data.verify, "scan"), (unpacked, "unpack"), (unpacked, "digest_of")):
        monkeypatch.setattr(module, name, None)
    assert open_corpus("enwik8", root) == first


def test_a_damaged_text_of_ours_is_noticed_and_made_anew(root, tmp_path, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8))
    root.chmod(0o555)
    text = open_corpus("enwik8", root).splits["train"].path
    text.write_bytes(mini_enwik8[::-1])
    assert content(open_corpus("enwik8", root)) == mini_enwik8


def test_the_archive_may_go_once_it_is_unpacked(root, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8))
    open_corpus("enwik8", root)
    (root / "enwik8.gz").unlink()
    assert content(open_corpus("enwik8", root)) == mini_enwik8


@pytest.mark.parametrize("closed", [False, True])
def test_a_changed_archive_is_noticed(root, mini_text8, monkeypatch, closed):
    archive = root / "text8.gz"
    for text in (b"abc " * 30, b"xyz " * 30, b"q " * 50):
        root.chmod(0o755)
        archive.write_bytes(gzip.compress(text))
        root.chmod(0o555 if closed else 0o755)
        with pytest.warns(UserWarning, match="NOT the standard text"):
            assert content(open_corpus("text8", root, allow_nonstandard=True)) == text
    calls = count_calls(monkeypatch, unpacked, "unpack")
    os.utime(archive, ns=(0, 1))  # touched, but the same
    with pytest.warns(UserWarning, match="NOT the standard text"):
        assert content(open_corpus("text8", root, allow_nonstandard=True)) == b"q " * 50
    assert calls == []


def test_a_file_of_the_users_is_never_overwritten(root, mini_enwik8):
    (root / "enwik8").write_bytes(b"mine")
    (root / "enwik8.zip").write_bytes(zipped("enwik8", mini_enwik8))
    with pytest.warns(UserWarning, match=r"size 4, expected 1000.*is used instead"):
        assert content(open_corpus("enwik8", root)) == mini_enwik8
    assert (root / "enwik8").read_bytes() == b"mine"


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
        OFFICIAL["enwik8"].__class__(
            **{**vars(OFFICIAL["enwik8"]), "sha256": hashlib.sha256(text).hexdigest()}
        ),
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


def serve(monkeypatch, body: bytes) -> list[str]:
    urls: list[str] = []

    def download(url, size, sha256, out):
        urls.append(url)
        out.write(body)

    monkeypatch.setattr(prepare, "download", download)
    return urls


@pytest.mark.parametrize("closed", [False, True])
def test_a_download_happens_once(root, tmp_path, mini_enwik8, monkeypatch, closed):
    urls = serve(monkeypatch, zipped("enwik8", mini_enwik8))
    root.chmod(0o555 if closed else 0o755)
    for _ in range(2):
        assert content(open_corpus("enwik8", root)) == mini_enwik8
    assert urls == [OFFICIAL["enwik8"].url]
    assert names(tmp_path / "cache" if closed else root) == {"enwik8"}


def test_a_root_that_is_not_there_is_made(tmp_path, mini_enwik8, monkeypatch):
    serve(monkeypatch, zipped("enwik8", mini_enwik8))
    assert content(open_corpus("enwik8", tmp_path / "a" / "b")) == mini_enwik8
    assert names(tmp_path / "a" / "b") == {"enwik8"}


def test_offline_the_error_says_what_to_do(root, mini_enwik8):
    with pytest.raises(DataError) as raised:
        open_corpus("enwik8", root)
    message = str(raised.value)
    official = OFFICIAL["enwik8"]
    for part in (
        official.url,
        official.archive_sha256,
        str(official.archive_size),
        official.sha256,
    ):
        assert part in message
    assert f"save it as {root}/enwik8.zip" in message
    assert "\n" not in message
    assert list(root.iterdir()) == []


def test_a_bad_download_leaves_nothing(root, mini_enwik8, monkeypatch):
    serve(monkeypatch, zipped("enwik8", mini_enwik8[::-1]))
    with pytest.raises(DataError, match="sha256"):
        open_corpus("enwik8", root)
    assert list(root.iterdir()) == []


@contextlib.contextmanager
def as_somebody_else(tmp_path):
    """Inside, the permissions of files count even if the tests run as root."""
    if os.getuid():
        yield
        return
    tmp_path.parent.chmod(0o711)
    tmp_path.parent.parent.chmod(0o711)
    for folder in (tmp_path, tmp_path / "tmp"):
        folder.chmod(0o777)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_an_unreadable_cache_is_replaced_by_a_private_one(root, tmp_path, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8))
    root.chmod(0o555)
    open_corpus("enwik8", root)
    cache = tmp_path / "cache"
    cache.chmod(0o700 if os.getuid() == 0 else 0)
    try:
        with as_somebody_else(tmp_path):
            with pytest.warns(UserWarning, match=f"cannot write to .*{cache}.* goes to"):
                corpus = open_corpus("enwik8", root)
            assert corpus.splits["train"].path.parent == private_folder()
            assert open_corpus("enwik8", root) == corpus
            assert content(corpus) == mini_enwik8
    finally:
        cache.chmod(0o700)


def test_an_unreadable_file_is_refused(root, tmp_path, mini_enwik8):
    (root / "enwik8").write_bytes(mini_enwik8)
    (root / "enwik8").chmod(0)
    with (
        as_somebody_else(tmp_path),
        pytest.raises(DataError, match=r"cannot read .*enwik8: Permission denied"),
    ):
        open_corpus("enwik8", root)


def test_an_explicit_cache_is_used(root, tmp_path, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8))
    root.chmod(0o555)
    corpus = open_corpus("enwik8", root, cache=tmp_path / "other")
    assert corpus.splits["train"].path.parent == tmp_path / "other"
    assert Store(root, tmp_path / "other").cache == tmp_path / "other"
