"""The model, how it is trained, and how it is measured."""

import os
import sys

# Before torch is imported: its OpenMP threads otherwise spin between two operations, and take the
# cores from the kernels' threads (docs/log.md).
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # Between the small operations of a step, waking up takes longer than a short wait.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
