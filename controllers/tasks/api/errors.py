"""The errors that plugins see, and may raise:

TaskError              `retryable` says if another round can help
├── BadConfig          the task's own part of the configuration, or an input, does not fit; only a change of it helps
├── BadPlugin          a plugin can't be loaded, or the plugins' configuration is wrong
├── BadState           the stored or the new plugin state does not fit its type
│   └── StateTooLarge  more than `MAX_STATE_BYTES` of JSON
├── NoPluginCatalog    the engine has no catalog of results
├── UnknownResource    no quota was registered for the resource
├── SecretNotFound     no place that is searched has the secret
├── IntentConflict     an attempt declared a second idempotency key
└── RemoteUnknown      after a crash, nothing can say if the remote work was created
"""

from __future__ import annotations

from typing import ClassVar

from store.errors import RcfarmError


class TaskError(RcfarmError):
    """A failure in the handling of an execution. A plugin that raises another exception is retried as well, within the
    execution's error budget; one with `retryable` false fails the execution at once. `is_outage`: not the execution is
    at fault but the system that the plugin drives; as other exceptions do, it can pause the plugin."""

    retryable: ClassVar[bool] = True
    is_outage: ClassVar[bool] = False


class BadConfig(TaskError, ValueError):
    """What the operator gave for the task does not fit; the text names the field and what is expected."""

    retryable = False


class BadPlugin(TaskError):
    """A plugin can't be loaded, or the plugins' configuration is wrong; the text names the plugin and what to do."""

    retryable = False


class BadState(TaskError, ValueError):
    """The plugin state does not fit the type that the plugin reads it as, or is no JSON value."""

    retryable = False


class StateTooLarge(BadState):
    """The plugin state has `size` bytes of JSON; `limit` are allowed."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"the plugin state has {size} bytes of JSON, above {limit}; keep large data in the DataStore")


class NoPluginCatalog(TaskError):
    """The engine has no catalog for plugins."""

    retryable = False


class UnknownResource(TaskError, LookupError):
    """No quota exists for the resource: register it when the plugin is loaded, or set it with `rcfarm quota set`."""


class SecretNotFound(TaskError, LookupError):
    """The secret is in none of the places that were searched; the text names them."""


class IntentConflict(TaskError):
    """An attempt has declared another idempotency key already."""

    retryable = False


class RemoteUnknown(TaskError):
    """An intent was declared, and nothing can say if the remote work exists. The engine waits with the reason
    `RemoteUnknown` until an operator decides; it never creates the work a second time."""
