"""A process that has computed with compiled kernels forks, and the child trains with them too."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.kernels.tester import ended_well
from tests.system.micro import micro, outcome

SECONDS = 60.0


def test_a_fork_with_the_kernels_loaded_trains_as_its_parent(
    run: Callable[..., None], tmp_path: Path
) -> None:
    changed = {
        "stage": "1",
        "schedule.stages.1.steps": 2,
        "model.backend": "tvm",
        "model.heads": 2,
        "model.width": 128,
    }
    dotted = {key.replace(".", "__"): value for key, value in changed.items()}
    run(**dotted)
    child = os.fork()
    if not child:
        try:
            run(**dotted, name="forked")
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        os._exit(1)
    assert ended_well(child, SECONDS)
    forked = micro(tmp_path, changed | {"name": "forked"})
    assert outcome(forked) == outcome(micro(tmp_path, changed))
