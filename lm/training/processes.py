"""The processes that share a run: how they start, end, and learn what the first one decided.

On one node the first process starts the others itself (`child_process`) and hands each its place
and the whole configuration through a pipe. The pipe stays open as long as the first process lives,
so when that is gone, however it went, the others see the end of it and go too. On several nodes
Slurm's srun or torchrun start all processes, and say in the environment who is who.

Lightning's own launcher leaves its processes running when the first one is killed, and shares the
terminal's signals with them (docs/deviations.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.utilities import rank_zero_only

from lm.config.schema import Config
from lm.errors import UserError
from lm.machine.cluster import Seat, seat_from_environment
from lm.training.signals import Signals, Stop, Stopped

LOCALHOST = "127.0.0.1"
PATIENCE = 10.0  # seconds in which a process that was told to end has to be gone


class Environment(LightningEnvironment):
    """Tells Lightning who is who; it has nothing to start."""

    creates_processes_externally = True

    def __init__(self, seat: Seat) -> None:
        super().__init__()
        self.seat = seat
        self.set_world_size(seat.world)

    def local_rank(self) -> int:
        """On this node."""
        return self.seat.local_rank

    def node_rank(self) -> int:
        """Of this node."""
        return self.seat.node


class Team:
    """The processes of a run, seen from one of them."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.first = seat.rank == 0

    def decide(self, action: Callable[[], Any]) -> Any:
        """Let the first process do something; all get its result (plain values), or its error."""
        if self.seat.world == 1:
            return action()
        answer: dict[str, Any] = {}
        refusal: UserError | None = None
        if self.first:
            try:
                answer = {"result": action()}
            except UserError as error:
                refusal, answer = error, {"error": str(error)}
        answer = self._told(answer)
        if refusal is not None:
            raise refusal
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["result"]

    def _told(self, value: Any) -> Any:
        """What the first process says, as JSON."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, 0)
        if not self.first:
            data = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(data, 0)
        return json.loads(bytes(data.tolist()))


@contextmanager
def joined(config: Config, kind: str, signals: Signals, seat: Seat | None) -> Iterator[Team]:
    """All processes of the run, connected; they end with it.

    Args:
        config: of the run; processes that are started here get the same.
        kind: of device, cpu or cuda.
        signals: learn which process this is, and of others that end too early.
        seat: of this process, if the first one started it.

    Raises:
        ConfigError: if another number of processes was started than the configuration has.
    """
    started = seat or seat_from_environment(config.trainer.devices, config.trainer.nodes)
    here = started or Seat(world=config.trainer.devices)
    rank_zero_only.rank = here.rank  # type: ignore[attr-defined]
    if here.world == 1:
        yield Team(here)
        return
    signals.first = here.rank == 0
    others = Others(here.world, signals.stop)
    try:
        store = meeting_point(here) if started is None or here.port else None
        if store is not None and here.rank == 0:
            others.start(config, store.port)
        connect(here, kind, store)
        yield Team(here)
        dist.barrier()
        others.finish()
        dist.destroy_process_group()
    except RuntimeError:
        others.blame()
        raise
    finally:
        others.end()


def meeting_point(seat: Seat) -> dist.TCPStore:
    """Where processes on this machine meet; the first one takes a port that is free."""
    first = seat.rank == 0
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    return dist.TCPStore(LOCALHOST, seat.port, seat.world, first, wait_for_workers=False)


def connect(seat: Seat, kind: str, store: dist.TCPStore | None) -> None:
    """Join the other processes: at `store`, or where the environment says."""
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(seat.local_rank)
        backend = "nccl"
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.world)


class Others:
    """The processes that the first one starts, and watches."""

    def __init__(self, world: int, stop: Stop) -> None:
        self.world = world
        self.stop = stop
        self.running: list[subprocess.Popen[bytes]] = []
        self._expected = False

    def start(self, config: Config, port: int) -> None:
        """Start all but the first, in sessions of their own: the terminal's signals pass them."""
        root = Path(__file__).parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        for rank in range(1, self.world):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lm.training.child_process"],
                stdin=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
            self.running.append(process)
            seat = Seat(rank, self.world, local_rank=rank, port=port)
            message = json.dumps({"seat": asdict(seat), "config": asdict(config)})
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is seen by the watcher
                process.stdin.write(message.encode() + b"\n")
                process.stdin.flush()
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._expected and code:
            text = f"the end of process {rank} of {self.world} (exit status {code})"
            self.stop.ask_main_thread(Stopped(text, 1))

    def blame(self) -> None:
        """After an error here: raise Stopped instead, if another process's end was its cause.

        The connection breaks first; the end of the process is seen later.
        """
        end = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < end:
            time.sleep(0.05)  # the watcher's signal ends the run here
            self.stop.check()

    def finish(self) -> None:
        """Wait until they have ended by themselves."""
        self._expected = True
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)

    def end(self) -> None:
        """Make them end: they go when their pipe ends; who does not is killed."""
        self._expected = True
        for process in self.running:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.running:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running = []
