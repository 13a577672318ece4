"""What an operation on a replication controller can answer instead of a result.

    RCError
    ├── BadInput             a value given by the caller is wrong; the message names the field
    ├── NoSuchRC             there is no RC of that id
    ├── RCExists             creating an id that is taken
    ├── RCRefused            the RC's state forbids the change; the message says what to do first
    ├── ChangedSincePlanned  the RC is not any more what the caller had looked at
    └── Contended            others kept changing the RC while we tried; trying again is safe

Errors of the store itself (`store.kv.StoreError`) pass through unchanged.
"""

from __future__ import annotations


class RCError(Exception):
    """An operation on an RC that was not done. Nothing was written."""


class BadInput(RCError, ValueError):
    """A value given by the caller is wrong."""


class NoSuchRC(RCError):
    """There is no RC of that id."""


class RCExists(RCError):
    """The id is taken."""


class RCRefused(RCError):
    """The RC's state forbids the change."""


class ChangedSincePlanned(RCError):
    """The RC was changed after the caller had looked at it."""


class Contended(RCError):
    """The RC kept changing under our hands."""
