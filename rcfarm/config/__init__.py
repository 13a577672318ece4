"""All settings, one class per topic, and where they are read from."""

from __future__ import annotations

from pathlib import Path

from store.errors import RcfarmError

MAX_TOKEN = 64 * 1024  # bytes that are read of its file


class BadSettings(RcfarmError, ValueError):
    """A setting can't be used; the message names it and says what to do."""


def token_in(setting: str, file: Path | str) -> str:
    """Return the token in the file that a setting names. Raises `BadSettings`."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            token = opened.read(MAX_TOKEN).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"{setting}: can't be read: {error}") from error
    if not token.isascii() or not token.isprintable() or not token:
        raise BadSettings(f"{setting}: {file} holds no token: one line of letters, digits and signs")
    return token
