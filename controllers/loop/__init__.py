"""The control loop of every operator: sources, handlers, work queue, rate limiters, workers, status writes, metrics."""

from controllers.loop.control_loop import ControlLoop, Source
from controllers.loop.workqueue import (
    BucketRateLimiter,
    ExponentialRateLimiter,
    MaxOfRateLimiter,
    RateLimiter,
    ShutDown,
    WorkQueue,
    default_rate_limiter,
)

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
