"""What the tests of the public corpora share."""

import contextlib
import io
import os
import stat
import zipfile
from pathlib import Path

from data.corpus import SPLITS


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


@contextlib.contextmanager
def as_somebody_else(tmp_path):
    """Inside, the permissions of files count even if the tests run as root."""
    if os.getuid():
        yield
        return
    for folder in tmp_path.parents:  # how many pytest makes depends on its plug-ins
        if folder.stat().st_mode & stat.S_IXOTH:
            break
        folder.chmod(0o711)
    for folder in (tmp_path, tmp_path / "tmp"):
        folder.chmod(0o777)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
