"""The control loop of every operator: sources, handlers, work queue, rate limiters, workers, status writes, metrics.

`ControlLoop` and `Source` are imported at first use: with them come the informers, which farms do without.
"""

from typing import TYPE_CHECKING

from controllers.loop.workqueue import (
    BucketRateLimiter,
    ExponentialRateLimiter,
    MaxOfRateLimiter,
    RateLimiter,
    ShutDown,
    WorkQueue,
    default_rate_limiter,
)
from store.imports import at_first_use

if TYPE_CHECKING:
    from controllers.loop.control_loop import ControlLoop, Source

__all__ = [
    "BucketRateLimiter",
    "ControlLoop",
    "ExponentialRateLimiter",
    "MaxOfRateLimiter",
    "RateLimiter",
    "ShutDown",
    "Source",
    "WorkQueue",
    "default_rate_limiter",
]

__getattr__ = at_first_use(__name__, {"ControlLoop": "control_loop", "Source": "control_loop"})
