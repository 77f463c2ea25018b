"""Archives are told by content, streamed with a limit, and cannot write anywhere."""

import gzip
import io
import lzma
import zipfile

import pytest

from data.archive import kind_of, unpack
from data.errors import DataError

TEXT = bytes(range(256)) * 40


def zipped(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as container:
        for name, text in members:
            container.writestr(name, text)
    return out.getvalue()


def unpack_bytes(archive: bytes, kind: str, limit: int = 10**6) -> tuple[int, bytes]:
    out = io.BytesIO()
    return unpack(io.BytesIO(archive), "ARCHIVE", kind, "enwik8", out, limit), out.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (zipped(("enwik8", TEXT)), "zip"),
        (zipped(), "zip"),
        (gzip.compress(TEXT), "gzip"),
        (lzma.compress(TEXT), "xz"),
        (b"\xef\xbb\xbf\n <!DOCTYPE html><html>403", "html"),
        (b"<HTML>", "html"),
        (b"<mediawiki xmlns", "raw"),
        (b"", "raw"),
        (TEXT, "raw"),
    ],
)
def test_kinds(tmp_path, content, kind):
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    assert kind_of(path) == kind


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(DataError, match="is a folder, expected a file"):
        kind_of(tmp_path)
    with pytest.raises(DataError, match=r"cannot read .*gone"):
        kind_of(tmp_path / "gone")


@pytest.mark.parametrize(
    ("archive", "kind"),
    [
        (zipped(("enwik8", TEXT)), "zip"),
        (zipped(("data/", b""), ("data/enwik8", TEXT), ("data/README", b"x")), "zip"),
        (zipped(("anything.txt", TEXT), ("__MACOSX/._anything.txt", b"x")), "zip"),
        (gzip.compress(TEXT), "gzip"),
        (gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]), "gzip"),
        (lzma.compress(TEXT), "xz"),
    ],
)
def test_unpack(archive, kind):
    assert unpack_bytes(archive, kind) == (len(TEXT), TEXT)


@pytest.mark.parametrize(
    "archive",
    [zipped(), zipped(("a", b"1"), ("b", b"2")), zipped(("a/enwik8", b""), ("enwik8", b""))],
)
def test_a_zip_without_one_clear_member_is_refused(archive):
    with pytest.raises(DataError, match=r"ARCHIVE holds .*: expected one file, named enwik8"):
        unpack_bytes(archive, "zip")


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..\\evil"])
def test_a_member_cannot_choose_where_it_goes(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert unpack_bytes(zipped((name, TEXT)), "zip") == (len(TEXT), TEXT)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tmp"]


@pytest.mark.parametrize("kind", ["zip", "gzip", "xz"])
def test_no_more_than_the_limit_is_unpacked(kind):
    bomb = bytes(10**7)
    make = {
        "zip": lambda text: zipped(("enwik8", text)),
        "gzip": gzip.compress,
        "xz": lzma.compress,
    }
    size, out = unpack_bytes(make[kind](bomb), kind, limit=1000)
    assert size == len(out) == 1001
    assert unpack_bytes(make[kind](bytes(1000)), kind, limit=1000)[0] == 1000


@pytest.mark.parametrize("keep", [0.05, 0.6, 0.999])
@pytest.mark.parametrize("kind", ["zip", "gzip", "xz"])
def test_a_truncated_archive_is_refused(kind, keep):
    noise = bytes((i * i * 31 + i // 7) % 251 for i in range(20_000))
    make = {
        "zip": lambda text: zipped(("enwik8", text)),
        "gzip": gzip.compress,
        "xz": lzma.compress,
    }
    whole = make[kind](noise)
    with pytest.raises(DataError, match=f"ARCHIVE is a truncated or damaged {kind} file"):
        unpack_bytes(whole[: int(len(whole) * keep)], kind)


@pytest.mark.parametrize("kind", ["zip", "gzip", "xz"])
def test_a_flipped_bit_is_noticed(kind):
    noise = bytes((i * i * 31 + i // 7) % 251 for i in range(20_000))
    make = {
        "zip": lambda text: zipped(("enwik8", text)),
        "gzip": gzip.compress,
        "xz": lzma.compress,
    }
    broken = bytearray(make[kind](noise))
    broken[len(broken) // 2] ^= 4
    with pytest.raises(DataError, match="truncated or damaged"):
        unpack_bytes(bytes(broken), kind)


def test_an_encrypted_member_is_refused():
    archive = bytearray(zipped(("enwik8", TEXT)))
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        archive[archive.index(magic) + flags] |= 1
    with pytest.raises(DataError, match="encrypted"):
        unpack_bytes(bytes(archive), "zip")
