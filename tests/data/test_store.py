"""Files appear whole or not at all, in the first folder that takes them."""

import os
import pwd
import threading
import time

import pytest
from filelock import FileLock

from data import store as module
from data.digests import Scan, cut, scan
from data.errors import DataError
from data.provenance import Record, Source, Stamp, decode, encode, stamp
from data.store import ABANDONED_S, Store, absolute, keyed, private_folder, publish


def test_publish(tmp_path):
    target = tmp_path / "new" / "file"
    with publish(target) as part:
        part.write(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), publish(target) as part:
        part.write(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "tmp"}


def test_a_published_file_can_be_read_by_others(tmp_path):
    with publish(tmp_path / "file") as part:
        part.write(b"x")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path):
    old, fresh = tmp_path / ".a.longchar.part", tmp_path / ".b.longchar.part"
    for path in (old, fresh):
        path.touch()
    then = time.time() - ABANDONED_S - 60
    os.utime(old, (then, then))
    with publish(tmp_path / "file") as part:
        part.write(b"x")
    assert not old.exists()
    assert fresh.exists()


def write_mark(folder):
    (folder / "mark").write_bytes(b"x")
    return folder


def test_the_first_folder_that_takes_files_gets_them(tmp_path):
    root, cache = tmp_path / "root", tmp_path / "mine"
    assert Store(root, cache).write(write_mark) == root
    root.joinpath("mark").unlink()
    root.chmod(0o555)
    assert Store(root, cache).write(write_mark) == cache
    assert Store(root / "below", cache).write(write_mark) == cache


def test_a_file_of_somebody_else_sends_the_writing_on(tmp_path):
    root, cache = tmp_path / "root", tmp_path / "mine"

    def write(folder):
        if folder == root:
            raise PermissionError
        return folder

    assert Store(root, cache).write(write) == cache


def test_the_private_folder_comes_last_and_with_one_warning(tmp_path):
    store = Store("/proc/none", "/proc/nothing")
    with pytest.warns(UserWarning, match="cannot write to /proc/none or /proc/nothing") as seen:
        assert store.write(write_mark) == private_folder()
        assert store.write(write_mark) == private_folder()
    assert len(seen) == 1
    assert private_folder().stat().st_mode & 0o777 == 0o700


def test_without_a_home_folder_the_private_one_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("LONGCHAR_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def unknown_user(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="LONGCHAR_CACHE can name a lasting folder"):
        assert Store("/proc/none").write(write_mark) == private_folder()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tmp"]


def test_a_full_disk_is_named(tmp_path):
    def write(folder):
        raise OSError(28, "No space left on device", str(folder / "big"))

    with pytest.raises(DataError, match=r"cannot keep .*No space left on device: .*big"):
        Store(tmp_path / "root").write(write)


def test_a_temporary_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    private_folder().rmdir()
    (tmp_path / "tmp" / f"longchar-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(DataError, match="belongs to another user: set TMPDIR"):
        private_folder()
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    (tmp_path / "tmp" / "longchar-12345678").mkdir()
    with pytest.raises(DataError, match="belongs to another user: set TMPDIR"):
        private_folder()


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute("~/x") == tmp_path / "x"
    with pytest.raises(DataError, match="~nobody-at-all/x: "):
        absolute("~nobody-at-all/x")


def test_a_lock_admits_one_at_a_time(tmp_path):
    store, inside, most = Store(tmp_path / "root"), 0, 0

    def work():
        nonlocal inside, most
        with store.lock("enwik8"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_waiting_for_a_lock_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    root = tmp_path / "root"
    with (
        FileLock(private_folder() / f"{keyed('enwik8', root)}.lock"),
        pytest.raises(DataError, match="another process has been preparing enwik8"),
        Store(root).lock("enwik8"),
    ):
        pass


def record_of(path, source=None) -> Record:
    return Record(stamp(path), scan(path, cut(path.stat().st_size, (0.5, 0.5))), source)


def test_records_come_back(tmp_path):
    text = tmp_path / ("x" * 200)
    text.write_bytes(bytes(range(256)))
    record = record_of(text, Source(Stamp("/a/b.gz", 5, 6), "abc"))
    store = Store(tmp_path / "root")
    assert store.load(text) is None
    assert store.save(record) == record
    assert store.load(text) == record == decode(encode(record))
    assert text.with_name("root").is_dir()


def test_a_changed_text_has_no_record(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"abcd")
    store = Store(tmp_path / "root")
    store.save(record_of(text))
    os.utime(text, ns=(0, 12345))
    assert store.load(text) is None
    store.save(record_of(text))
    assert store.load(text)
    text.write_bytes(b"abcde")
    assert store.load(text) is None
    text.unlink()
    assert store.load(text) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 0}', b'{"format": 1}', b"\xff"])
def test_a_damaged_record_counts_as_none(damage):
    assert decode(damage) is None


def test_a_record_of_another_shape_counts_as_none(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"abcd")
    good = encode(record_of(text))
    assert decode(good)
    assert decode(good.replace(b'"format": 1', b'"format": 2')) is None
    assert decode(good.replace(b'"size": 4', b'"size": "four"')) is None
    assert decode(good.replace(b"6162", b"6z")) is None


def test_records_are_small():
    facts = Scan("0" * 64, (0, 1, 2, 3), ("0" * 64,) * 3, (bytes(range(256)),) * 3)
    assert len(encode(Record(Stamp("p", 3, 0), facts))) < 4000
