"""The form of a pod's secrets, in a file of a node or under a key of Consul: lines `NAME=value`.

Blank lines, and lines that begin with `#`, do not count. Everything behind the first `=` is the value; quotes around
the whole of it, single or double, are not part of it. Nothing is expanded or escaped.
"""

from __future__ import annotations

import re

from store.errors import RcfarmError

MAX_SECRET = 64 * 1024  # bytes
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class BadVariables(RcfarmError, ValueError):
    """Invalid variables. The message names the line, never what stands there."""


def is_secret_key(key: str) -> bool:
    """Return whether `key` can name a secret: 1 to 128 ASCII letters, digits and `_.-`, of which the last two do not
    begin it."""
    return _KEY.fullmatch(key) is not None


def parse_variables(content: bytes) -> dict[str, str]:
    """Return the variables by name. Raises `BadVariables`."""
    if len(content) > MAX_SECRET:
        raise BadVariables(f"has more than {MAX_SECRET} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise BadVariables("is not UTF-8 text; write binary values as base64") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip()
        if not equals or not _VARIABLE.fullmatch(name):
            raise BadVariables(f"line {number}: write NAME=value; a name has letters, digits and _, and no digit first")
        if name in found:
            raise BadVariables(f"line {number}: {name} is given twice")
        if "\0" in value:
            raise BadVariables(f"line {number}: has a NUL character, which no variable can have")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[name] = value
    return found
