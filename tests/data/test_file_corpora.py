"""Texts of the user's own: any bytes, one file or three."""

import hashlib
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.verify
from data.corpus import SPLITS, DataError, check_length, open_corpus


@given(
    text=st.binary(min_size=30, max_size=400),
    shares=st.tuples(*[st.integers(1, 5)] * 3),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_splits_are_the_file(tmp_path, text, shares):
    path = tmp_path / "any"
    path.write_bytes(text)
    os.utime(path, ns=(0, hash((text, shares)) % 10**15))
    fractions = tuple(share / sum(shares) for share in shares)
    corpus = open_corpus("file", tmp_path / "root", path=path, fractions=fractions)
    splits = [corpus.splits[name] for name in SPLITS]
    assert b"".join(split.read().tobytes() for split in splits) == text
    assert [split.start for split in splits] == [0, splits[0].stop, splits[1].stop]
    assert corpus.symbols == len(set(splits[0].read().tolist()))


def test_nothing_is_decoded(tmp_path):
    """0x92, NUL, CR LF and a character cut in two by a border stay the bytes they are."""
    text = b"\x92\x00\xff\r\n\r\r\n\n" + b"x" * 80 + "€".encode() + b"y" * 8
    path = tmp_path / "odd"
    path.write_bytes(text)
    corpus = open_corpus("file", tmp_path, path=path)
    assert corpus.splits["train"].read().tobytes()[-1:] == "€".encode()[:1]
    assert corpus.splits["valid"].read().tobytes()[:2] == "€".encode()[1:]
    assert sum(len(split) for split in corpus.splits.values()) == len(text)


def write_three(folder, sizes=(100, 20, 10)) -> dict[str, str]:
    keys = {}
    for name, size in zip(SPLITS, sizes, strict=True):
        (folder / f"{name}.txt").write_bytes(bytes(range(size)))
        keys[f"{name}_path"] = str(folder / f"{name}.txt")
    return keys


def test_three_files(tmp_path):
    corpus = open_corpus("file", tmp_path / "root", **write_three(tmp_path))
    for name, size in zip(SPLITS, (100, 20, 10), strict=True):
        split = corpus.splits[name]
        assert (split.start, split.stop, split.path) == (0, size, tmp_path / f"{name}.txt")
        assert split.sha256 == hashlib.sha256(bytes(range(size))).hexdigest()
        np.testing.assert_array_equal(split.read(), np.arange(size))


def test_symbols_are_those_of_train_alone(tmp_path):
    first = open_corpus("file", tmp_path / "root", **write_three(tmp_path)).symbols
    keys = write_three(tmp_path, (100, 20, 256))
    assert open_corpus("file", tmp_path / "root", **keys).symbols == first == 100


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_split_is_named(tmp_path, empty):
    sizes = [5, 5, 5]
    sizes[empty] = 0
    name = SPLITS[empty]
    with pytest.raises(DataError, match=rf"{name} split is empty: .*/{name}\.txt has 0 bytes"):
        open_corpus("file", tmp_path / "root", **write_three(tmp_path, tuple(sizes)))


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "none").write_bytes(b"")
    with pytest.raises(DataError, match=r"train split is empty: .*/none has 0 bytes"):
        open_corpus("file", tmp_path, path=tmp_path / "none")


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*/gone: No such file"):
        open_corpus("file", tmp_path, path=tmp_path / "gone")
    with pytest.raises(DataError, match="is a folder, expected a file"):
        open_corpus("file", tmp_path, path=tmp_path)
    with pytest.raises(DataError, match="/dev/null is not a regular file"):
        open_corpus("file", tmp_path, path="/dev/null")


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("wikitext", {}, "data.name=wikitext: expected one of enwik8, text8, file, stdlib"),
        ("file", {}, "needs either data.path or all of .* given: none"),
        ("file", {"train_path": "a", "test_path": "b"}, "given: data.train_path, data.test_path"),
        ("file", {"path": "a", "train_path": "b"}, "given: data.path, data.train_path"),
        ("enwik8", {"path": "a"}, "data.path: only for data=file, not for data=enwik8"),
        (
            "file",
            {"path": "a", "allow_nonstandard": True},
            "data.allow_nonstandard: only for",
        ),
        ("text8", {"fractions": (0.8, 0.1, 0.1)}, "only for data=file with data.path"),
        ("file", {"path": "a", "fractions": (0.9, 0.1)}, "expected three numbers above 0"),
        ("file", {"path": "a", "fractions": (0.9, 0.1, 0.0)}, "expected three numbers above 0"),
        ("file", {"path": "a", "fractions": (0.9, 0.1, float("nan"))}, "three numbers above 0"),
        ("file", {"path": "a", "fractions": (0.9, 0.1, 0.1)}, "sum to 1.1.*, expected 1"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, name, keys, message):
    with pytest.raises(DataError, match=message):
        open_corpus(name, tmp_path, **keys)


def test_a_list_of_fractions_will_do(tmp_path):
    (tmp_path / "text").write_bytes(bytes(100))
    corpus = open_corpus("file", tmp_path, path=tmp_path / "text", fractions=[0.5, 0.3, 0.2])
    assert [len(split) for split in corpus.splits.values()] == [50, 30, 20]


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path, monkeypatch):
    path, root = tmp_path / "text", tmp_path / "root"
    path.write_bytes(bytes(100))
    before = open_corpus("file", root, path=path)
    path.write_bytes(bytes(100).replace(b"\0", b"\1"))
    os.utime(path, ns=(0, 1))
    after = open_corpus("file", root, path=path)
    assert after.splits["test"].sha256 != before.splits["test"].sha256
    monkeypatch.setattr(data.verify, "scan", None)
    assert open_corpus("file", root, path=path) == after


def test_other_fractions_cut_anew(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(100)))
    for fractions in ((0.9, 0.05, 0.05), (0.5, 0.3, 0.2), (0.9, 0.05, 0.05)):
        corpus = open_corpus("file", tmp_path, path=tmp_path / "text", fractions=fractions)
        assert [len(corpus.splits[name]) for name in SPLITS] == [100 * f for f in fractions]
        test = corpus.splits["test"]
        assert test.sha256 == hashlib.sha256(bytes(range(test.start, 100))).hexdigest()


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch):
    path, plain = tmp_path / "text", data.verify.scan
    path.write_bytes(bytes(100))

    def scan(path, cuts):
        facts = plain(path, cuts)
        os.utime(path, ns=(0, 1))
        return facts

    monkeypatch.setattr(data.verify, "scan", scan)
    with pytest.raises(DataError, match="text changed while it was read: start again"):
        open_corpus("file", tmp_path / "root", path=path)


def test_a_file_that_shrank_since_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(100))
    split = open_corpus("file", tmp_path / "root", path=path).splits["test"]
    path.write_bytes(bytes(50))
    with pytest.raises(DataError, match="has 50 bytes by now, the test split needs 100"):
        split.read()
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*text: No such file"):
        split.read()


def test_paths_are_relative_to_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(bytes(100))
    monkeypatch.chdir(tmp_path)
    split = open_corpus("file", "root", path="text").splits["valid"]
    monkeypatch.chdir("/")
    assert len(split.read()) == len(split) == 5


def test_a_name_that_is_no_text_can_be_described(tmp_path):
    path = tmp_path / os.fsdecode(b"\x92 \xc3\xa9\n")
    path.write_bytes(bytes(100))
    lines = open_corpus("file", tmp_path, path=path).describe()
    assert all(line.isprintable() for line in lines)
    assert r"\udc92 é\n" in lines[1]


def test_nothing_is_written_beside_the_users_file(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "text").write_bytes(bytes(100))
    open_corpus("file", tmp_path / "root", path=folder / "text")
    assert [entry.name for entry in folder.iterdir()] == ["text"]


@pytest.mark.parametrize(("size", "enough"), [(1000, False), (2048, False), (2049, True)])
def test_check_length(tmp_path, size, enough):
    keys = write_three(tmp_path)
    (tmp_path / "train.txt").write_bytes(bytes(size))
    split = open_corpus("file", tmp_path / "root", **keys).splits["train"]
    if enough:
        check_length(split, 2048, "stage 1")
        return
    message = rf"stage 1 needs 2049 bytes of the train split .*2048 .*found {size} in .*train\.txt"
    with pytest.raises(DataError, match=message):
        check_length(split, 2048, "stage 1")
