"""Small stand-ins for the public corpora, and folders of each test's own."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

from data import official

SIZE = 1000


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("LONGCHAR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty data folder."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def _shrink(monkeypatch: pytest.MonkeyPatch, name: str, text: bytes) -> bytes:
    small = dataclasses.replace(
        official.OFFICIAL[name],
        url=f"https://nowhere.invalid/{name}.zip",
        size=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
        split_sha256=None,
    )
    monkeypatch.setitem(official.OFFICIAL, name, small)
    return text


@pytest.fixture
def mini_enwik8(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """1000 bytes of all values, which are what `enwik8` means in this test."""
    text = np.random.default_rng(8).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
    return _shrink(monkeypatch, "enwik8", text)


@pytest.fixture
def mini_text8(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """1000 bytes of a-z and space, with spaces at all edges of its splits."""
    symbols = np.frombuffer(b" abcdefghijklmnopqrstuvwxyz", np.uint8)
    text = np.random.default_rng(9).choice(symbols, SIZE)
    text[[0, 899, 900, 949, 950, 999]] = ord(" ")
    return _shrink(monkeypatch, "text8", text.tobytes())
