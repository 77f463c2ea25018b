"""enwik8 and text8 are found in any form, unpacked once, and made anew when they change."""

import gzip
import hashlib
import lzma
import os

import numpy as np
import pytest

import data.verify
from data import unpacking as unpacked
from data.corpus import SPLITS, open_corpus
from data.digests import FRACTIONS
from data.official import OFFICIAL
from data.provenance import Record, Source, stamp
from data.store import Store, private_folder
from data.verify import examine
from tests.data.helpers import as_somebody_else, content, names, zipped

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
        assert names(root) == ({"text8.gz"} if closed else {"text8.gz", "text8"})
    calls = count_calls(monkeypatch, unpacked, "unpack")
    os.utime(archive, ns=(0, 1))  # touched, but the same
    with pytest.warns(UserWarning, match="NOT the standard text"):
        assert content(open_corpus("text8", root, allow_nonstandard=True)) == b"q " * 50
    assert calls == []


def test_a_changed_archive_is_noticed_after_its_text_was_cut_otherwise(root, mini_text8):
    archive = root / "text8.gz"
    for text in (b"abc " * 30, b"xyz " * 30):
        archive.write_bytes(gzip.compress(text))
        with pytest.warns(UserWarning, match="NOT the standard text"):
            assert content(open_corpus("text8", root, allow_nonstandard=True)) == text
        open_corpus("file", root, path=root / "text8", fractions=(0.5, 0.3, 0.2))


def test_a_source_that_the_writer_notes_during_our_reading_is_kept(root, tmp_path, monkeypatch):
    text, store, plain = root / "text8", Store(root), data.verify.scan
    text.write_bytes(bytes(100))
    source = Source(stamp(text), "0" * 64)

    def scan(path, cuts):
        facts = plain(path, cuts)
        store.save(Record(stamp(path), facts, source))
        return facts

    monkeypatch.setattr(data.verify, "scan", scan)
    assert examine(text, FRACTIONS, store).source == source
    assert store.load(text).source == source


def test_an_archive_of_the_standard_text_may_change_once_it_is_unpacked(root, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8))
    open_corpus("enwik8", root)
    (root / "enwik8.gz").write_bytes(b"<html>")
    assert content(open_corpus("enwik8", root)) == mini_enwik8


def test_the_right_archive_is_not_taken_for_another(root, mini_text8):
    (root / "text8.xz").write_bytes(lzma.compress(b"abc " * 30))
    with pytest.warns(UserWarning, match="NOT the standard text"):
        open_corpus("text8", root, allow_nonstandard=True)
    (root / "text8.zip").write_bytes(zipped("text8", mini_text8))
    with pytest.warns(UserWarning, match="is used instead"):
        assert content(open_corpus("text8", root)) == mini_text8


def test_a_file_of_the_users_is_never_overwritten(root, mini_enwik8):
    (root / "enwik8").write_bytes(b"mine")
    (root / "enwik8.zip").write_bytes(zipped("enwik8", mini_enwik8))
    with pytest.warns(UserWarning, match=r"size 4, expected 1000.*is used instead"):
        assert content(open_corpus("enwik8", root)) == mini_enwik8
    assert (root / "enwik8").read_bytes() == b"mine"


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


def test_an_explicit_cache_is_used(root, tmp_path, mini_enwik8):
    (root / "enwik8.gz").write_bytes(gzip.compress(mini_enwik8))
    root.chmod(0o555)
    corpus = open_corpus("enwik8", root, cache=tmp_path / "other")
    assert corpus.splits["train"].path.parent == tmp_path / "other"
