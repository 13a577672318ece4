"""Names on the wire, as HiveD defines them, and the priorities by which leaf cells are counted."""

from __future__ import annotations

from typing import Final

GROUP: Final = "hivedscheduler.microsoft.com"
POD_SCHEDULING_ENABLE: Final = f"{GROUP}/pod-scheduling-enable"  # the resource whose limit > 0 enables a pod
POD_SCHEDULING_SPEC: Final = f"{GROUP}/pod-scheduling-spec"
POD_BIND_INFO: Final = f"{GROUP}/pod-bind-info"
POD_LEAF_CELL_ISOLATION: Final = f"{GROUP}/pod-leaf-cell-isolation"
OLD_POD_GPU_ISOLATION: Final = f"{GROUP}/pod-gpu-isolation"  # on pods that an early HiveD bound

FREE_PRIORITY: Final = -2
OPPORTUNISTIC_PRIORITY: Final = -1
MIN_GUARANTEED_PRIORITY: Final = 0
MAX_GUARANTEED_PRIORITY: Final = 1000
