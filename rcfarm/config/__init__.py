"""All settings, one class per topic, and where they are read from."""

from __future__ import annotations

from store.errors import RcfarmError


class BadSettings(RcfarmError, ValueError):
    """A setting can't be used; the message names it and says what to do."""
