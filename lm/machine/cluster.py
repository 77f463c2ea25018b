"""Who is who among processes that srun or torchrun started.

Lightning's readers of the environment are used; it takes seconds to import, so only when asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lm.errors import ConfigError


@dataclass(frozen=True)
class Seat:
    """A process's place: its number among all, and on its node.

    Attributes:
        port: of the first process's meeting point, if that process started this one; else 0.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: int = 0
    port: int = 0


def seat_from_environment(devices: int, nodes: int) -> Seat | None:
    """The place that srun or torchrun gave to this process; None if neither started it.

    Raises:
        ConfigError: if the numbers of processes differ.
    """
    from lightning_fabric.plugins.environments import (
        ClusterEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )

    environment: ClusterEnvironment
    if "TORCHELASTIC_RUN_ID" in os.environ:
        environment, starter = TorchElasticEnvironment(), "torchrun"
    elif SLURMEnvironment.detect():
        try:
            environment, starter = SLURMEnvironment(auto_requeue=False), "srun"
        except RuntimeError as error:
            raise ConfigError(
                f"trainer.devices={devices}, trainer.nodes={nodes}: {error}"
            ) from error
        os.environ.setdefault("MASTER_ADDR", environment.main_address)
        os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    elif nodes > 1:
        raise ConfigError(
            f"trainer.nodes={nodes}: this process knows of no others; start it on each "
            "node with srun or torchrun"
        )
    else:
        return None
    world = environment.world_size()
    if world != devices * nodes:
        raise ConfigError(
            f"trainer.devices={devices}, trainer.nodes={nodes}: expected "
            f"{devices * nodes} processes, {starter} says there are {world}; let "
            "both agree (Slurm: --ntasks-per-node is trainer.devices, --nodes is trainer.nodes)"
        )
    rank, local = environment.global_rank(), environment.local_rank()
    return Seat(rank, world, local, environment.node_rank())
