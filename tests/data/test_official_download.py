"""Without a file the corpus is downloaded, once; offline the error says what to do."""

import contextlib

import pytest

from data import prepare
from data.corpus import DataError, open_corpus
from data.official import OFFICIAL
from data.store import Store
from tests.data.helpers import content, names, zipped


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


def test_what_another_process_fetched_meanwhile_is_taken(root, mini_enwik8, monkeypatch):
    urls = serve(monkeypatch, b"")

    @contextlib.contextmanager
    def lock(store, name):
        (root / "enwik8").write_bytes(mini_enwik8)
        yield

    monkeypatch.setattr(Store, "lock", lock)
    assert content(open_corpus("enwik8", root)) == mini_enwik8
    assert urls == []


@pytest.mark.parametrize("allow", [False, True])
def test_a_bad_download_leaves_nothing(root, mini_enwik8, monkeypatch, allow):
    serve(monkeypatch, zipped("enwik8", mini_enwik8[::-1]))
    with pytest.raises(DataError, match="sha256"):
        open_corpus("enwik8", root, allow_nonstandard=allow)
    assert list(root.iterdir()) == []
