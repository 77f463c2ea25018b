"""The model, how it is trained, and how it is measured."""

import os
import sys

# Before torch is imported: its OpenMP threads otherwise spin between two operations, and take the
# cores from the kernels' threads (docs/log.md).
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
