"""Errors of operations on RCs, and on tasks and what belongs to them: quotas and schedules.

    RCError
    ├── BadInput             a value given by the caller is wrong; the message names the field
    ├── NoSuchRC             there is no RC of that id
    ├── RCExists             creating an id that is taken
    ├── RCRefused            the RC's state forbids the change; the message says what to do first
    ├── ChangedSincePlanned  the object was changed after the caller had read it
    └── Contended            other clients changed the object during every attempt; a retry is safe
    TaskRequestError
    ├── NotFound             there is no task, quota or schedule of that name
    ├── TaskExists           submitting an id that is taken
    └── TaskRefused          the state forbids the change; the message says what to do first

Errors of the store itself (`store.kv.protocol.StoreError`) pass through unchanged.
"""

from __future__ import annotations

from store.errors import RcfarmError


class RCError(RcfarmError):
    """An operation on an RC failed; nothing was written."""


class BadInput(RCError, ValueError):
    """A value given by the caller is wrong."""


class NoSuchRC(RCError):
    """There is no RC of that id."""


class RCExists(RCError):
    """The id is taken."""


class RCRefused(RCError):
    """The RC's state forbids the change."""


class ChangedSincePlanned(RCError):
    """The object was changed after the caller had read it."""


class Contended(RCError):
    """Other clients changed the object during every attempt."""


class TaskRequestError(RcfarmError):
    """An operation on a task, a quota or a schedule failed; nothing was written."""


class NotFound(TaskRequestError):
    """There is no task, quota or schedule of that name."""


class TaskExists(TaskRequestError):
    """The id is taken."""


class TaskRefused(TaskRequestError):
    """The state forbids the change."""
