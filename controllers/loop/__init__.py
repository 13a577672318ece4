"""The control loop of every operator: sources, handlers, work queue, rate limiters, workers, status writes, metrics."""

from controllers.loop.control_loop import ControlLoop, Source
from controllers.loop.ratelimit import (
    BucketRateLimiter,
    ExponentialRateLimiter,
    MaxOfRateLimiter,
    RateLimiter,
    default_rate_limiter,
)
from controllers.loop.workqueue import ShutDown, WorkQueue

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
