"""A process that another one of the run has started (see `processes`)."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm.config.schema import Config


def main() -> None:
    """Do this process's part of the training that the first one describes on standard input."""
    pipe = io.FileIO(0, closefd=False)  # without a buffer, whose lock would bar the way out
    invitation = json.loads(pipe.readline())
    threading.Thread(target=leave_with_first, args=(pipe,), daemon=True).start()
    sys.excepthook = leave_with_error
    # Only now, since these imports take seconds in which the first process may end.
    from lm.config.command_line import USER_ERRORS, one_line
    from lm.machine.cluster import Seat
    from lm.training.processes import PATIENCE
    from lm.training.run import train

    seat = Seat(**invitation["seat"])
    try:
        train(config_of(invitation["config"]), seat)
    except USER_ERRORS as error:
        # What hinders all processes is said by the first one, which ends them.
        threading.Event().wait(PATIENCE)
        sys.exit(f"error: process {seat.rank} of {seat.world}: {one_line(str(error))}")


def leave_with_first(pipe: io.FileIO) -> None:
    """End this process, whatever it is doing, when the first one is gone."""
    while pipe.read(1):
        pass
    os._exit(1)


def leave_with_error(_: type, error: BaseException, *__: Any) -> None:
    """Say what went wrong, and be gone at once: the first process waits for this end to be told."""
    # torch.distributed calls this with another sys.stderr, to which it would add the rank later.
    traceback.print_exception(error, file=sys.__stderr__)
    os._exit(1)


def config_of(values: dict[str, Any]) -> Config:
    """The typed configuration that these plain values describe."""
    from omegaconf import OmegaConf

    from lm.config.schema import Config

    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
    assert isinstance(config, Config)
    return config


if __name__ == "__main__":
    main()
