"""What holds for every test: no network, no folder of the user's, few threads, fixed seeds.

The environment is set while this file is imported, which pytest does before it imports any other
conftest or test; child processes inherit it.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from jaxtyping import install_import_hook

KEPT = Path(__file__).resolve().parent.parent / ".pytest_cache" / "longchar"
# Of the surroundings; a test that wants one of these sets it for itself.
LEFT_OUTSIDE = ("LONGCHAR_", "SLURM_", "WANDB_", "HYDRA_")
LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
THREADS = "2"
# Types are checked at run time, as in mypy an int may stand for a float.
TYPES = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"


def set_environment(scratch: Path) -> None:
    """Let everything be written below `scratch`, or kept in the checkout's own cache."""
    for name in list(os.environ):
        if name.startswith(LEFT_OUTSIDE) or name in LAUNCHERS:
            del os.environ[name]
    # Compiled kernels outlive the session, inside the checkout: a file's name there is a hash of
    # all that made it, so an outdated one is never found. Everything else is made anew.
    for name in ("kernels", "matplotlib"):
        (KEPT / name).mkdir(parents=True, exist_ok=True)
    (scratch / "longchar").mkdir()
    (scratch / "longchar" / "kernels").symlink_to(KEPT / "kernels")
    os.environ["LONGCHAR_CACHE"] = str(scratch / "longchar")
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{kind}_HOME"] = str(scratch / kind.lower())
    os.environ["MPLCONFIGDIR"] = str(KEPT / "matplotlib")  # its list of fonts
    os.environ["MPLBACKEND"] = "Agg"
    os.environ["WANDB_MODE"] = "disabled"
    # Reaches child processes, where `offline` below does not: nobody listens on this port.
    os.environ["http_proxy"] = os.environ["https_proxy"] = "http://127.0.0.1:9"
    os.environ["no_proxy"] = "localhost,127.0.0.1,::1"
    os.environ.setdefault("OMP_NUM_THREADS", THREADS)
    # Test modules import torch before kernels, which would set this. Threads that spin while they
    # wait took four times the processor time beside a second process of tests.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TVM_NUM_THREADS", THREADS)


SCRATCH = Path(tempfile.mkdtemp(prefix="longchar-tests-"))
set_environment(SCRATCH)
install_import_hook(["lm", "data", "kernels"], TYPES)


def pytest_configure() -> None:
    hypothesis.settings.register_profile(
        "suite",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("suite")


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers whichever tests run before."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def offline() -> Iterator[None]:
    """Connections end at this machine; looking up any other host fails as it does offline."""
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def look_up_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_here(host):
            raise socket.gaierror(socket.EAI_NONAME, f"tests have no network: {host}")
        return look_up(host, *args, **kwargs)

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not _is_here(address[0]):
            raise ConnectionRefusedError(f"tests have no network: {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up_here)
        patch.setattr(socket.socket, "connect", connect_here)
        yield


def _is_here(host: str | bytes | None) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
