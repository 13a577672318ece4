"""Errors of operations on replication controllers.

    RCError
    ├── BadInput             a value given by the caller is wrong; the message names the field
    ├── NoSuchRC             there is no RC of that id
    ├── RCExists             creating an id that is taken
    ├── RCRefused            the RC's state forbids the change; the message says what to do first
    ├── ChangedSincePlanned  the RC was changed after the caller had read it
    └── Contended            other clients changed the RC during every attempt; a retry is safe

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
    """The RC was changed after the caller had read it."""


class Contended(RCError):
    """Other clients changed the RC during every attempt."""
