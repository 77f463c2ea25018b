"""The standard library as a text: every file, in order, byte for byte, made once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data import prepare
from data.corpus import SPLITS, DataError, open_corpus
from data.stdlib import stdlib_files, stdlib_folder

REPOSITORY = Path(__file__).parents[2]


def test_the_real_one():
    files = stdlib_files(stdlib_folder())
    size = sum((stdlib_folder() / name).stat().st_size for name in files)
    assert 8e6 < size < 20e6
    assert files == sorted(files)
    assert {"argparse.py", "asyncio/base_events.py", "xml/dom/minidom.py"} < set(files)
    for part in ("test", "tests", "idle_test", "site-packages", "__pycache__"):
        assert not any(part in name.split("/")[:-1] for name in files)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library with things that must be left out."""
    folder = tmp_path / "lib"
    texts = {
        "b.py": b"\x92second\r\n",
        "a/z.py": b"first, with no end of line",
        "a.py": b"",
        "c/test/x.py": b"no",
        "c/tests/x.py": b"no",
        "c/idle_test/x.py": b"no",
        "site-packages/x.py": b"no",
        "c/x.pyc": b"no",
        "c/test.py": b"third" * 20,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    (folder / "gone.py").symlink_to("nowhere")
    monkeypatch.setattr(prepare, "stdlib_folder", lambda: folder)
    return folder


def content(corpus) -> bytes:
    return b"".join(corpus.splits[name].read().tobytes() for name in SPLITS)


WHOLE = b"first, with no end of line\x92second\r\n" + b"third" * 20


def test_files_are_joined_in_order(library, root):
    corpus = open_corpus("stdlib", root)
    assert content(corpus) == WHOLE
    size = len(WHOLE)
    assert corpus.splits["valid"].start == size * 9 // 10
    assert corpus.splits["test"].start == size * 95 // 100
    assert f"{size} bytes, sha256" in corpus.describe()[0]
    assert "standard library of Python 3." in corpus.describe()[0]


def test_it_is_made_once_and_anew_when_a_file_changes(library, root, monkeypatch):
    first = open_corpus("stdlib", root)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "concatenate", None)
        assert open_corpus("stdlib", root) == first
    (library / "b.py").write_bytes(b"changed")
    assert content(open_corpus("stdlib", root)) == WHOLE.replace(b"\x92second\r\n", b"changed")
    (library / "a.py").unlink()
    (library / "c" / "new.py").write_bytes(b"new")
    assert b"newthird" in content(open_corpus("stdlib", root))
    assert len([path for path in root.iterdir() if path.suffix != ".json"]) == 1


def test_a_library_without_source_is_refused(root, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "stdlib_folder", lambda: tmp_path / "nothing")
    with pytest.raises(DataError, match="has no source text; use data=file"):
        open_corpus("stdlib", root)


def start(root: Path, cache: Path, name: str, **more: str) -> subprocess.Popen:
    environment = {**os.environ, "LONGCHAR_CACHE": str(cache), "TMPDIR": str(cache.parent / "tmp")}
    environment |= {"PYTHONPATH": "", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", **more}
    return subprocess.Popen(
        [sys.executable, "-m", "data.prepare", name, "--root", str(root)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_four_cold_processes_at_once(root, tmp_path):
    """Through the command, whose terminal knows ASCII only."""
    folder = root / "é"
    processes = [start(folder, tmp_path / "cache", "stdlib", LC_ALL="C.UTF-8") for _ in range(4)]
    outcomes = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    assert {outcome[1:] for outcome in outcomes} == {("", 0)}
    assert len({outcome[0] for outcome in outcomes}) == 1
    lines = outcomes[0][0].splitlines()
    assert r"/\xe9/stdlib-" in lines[1]
    assert [line.split(":")[0] for line in lines] == ["stdlib", *SPLITS, "symbols in train"]
    assert len(list(folder.iterdir())) == 2


def test_the_command_ends_in_one_line_when_it_fails(root, tmp_path):
    process = start(root, tmp_path / "cache", "wikitext", LC_ALL="C")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == "error: data.name=wikitext: expected one of enwik8, text8, file, stdlib\n"
