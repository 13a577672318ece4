"""Settings that the Framework operator has both in `frameworkcontroller.yaml` and in rcfarm's own section `jobs`.

Each is declared once, with rcfarm's name as its attribute and frameworkcontroller's as its name in the file. The module
imports nothing heavy, as every command of rcfarm reads its settings.
"""

from __future__ import annotations

import msgspec
from msgspec import field


class ConfigSection(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A part of the file. Unknown fields are refused, as they are probably misspelled."""


class OperatorSettings(ConfigSection, frozen=True, kw_only=True):
    """What both have in common. Durations in seconds."""

    workers: int = field(default=200, name="workerNumber")
    """Jobs of each kind reconciled at once. Default: 200: a worker mostly waits for the API server."""

    cache_timeout: int = field(default=300, name="objectLocalCacheCreationTimeoutSec")
    """Seconds within which a created object must be observed, else its attempt fails; at least 60. Default: 300."""

    retain_completed: int = field(default=2592000, name="frameworkCompletedRetainSec")
    """Seconds for which a completed Framework is kept. Default: 2592000, 30 days."""

    conflict_delay_min: int = field(default=60, name="frameworkMinRetryDelaySecForTransientConflictFailed")
    """Minimum delay, in seconds, before retrying a Framework that failed because it got only some of its resources.
    Default: 60."""

    conflict_delay_max: int = field(default=900, name="frameworkMaxRetryDelaySecForTransientConflictFailed")
    """Maximum of that delay, which is random, so that gangs that starve each other retry at different times. Default:
    900."""

    compress_large_status: bool = field(default=False, name="largeFrameworkCompression")
    """Whether statuses near etcd's size limit are compressed. Default: false: not all readers can decompress them."""

    default_completion_policy: bool = False
    """Whether a task role without a completion policy fails the attempt with its first failed task. Default: false: as
    with frameworkcontroller, a Framework whose tasks all failed counts as succeeded then."""

    headless_services: bool = False
    """Whether each task role gets a headless Service, `FRAMEWORK-ROLE`, which gives its pods names in DNS; only in
    native mode. Names of Services begin with a letter and have at most 63 characters: a role without such a name gets
    none. Default: false: the barrier provides addresses without it."""

    disruption_budgets: bool = False
    """Whether the pods of each attempt get a PodDisruptionBudget, so that no drain breaks a gang; only in native mode.
    Default: false, because a node that runs a Framework could not be drained before the attempt ends."""
