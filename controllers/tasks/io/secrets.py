"""Secrets for plugins, and their removal from every text that leaves the process.

A secret is looked up at each call, so a rotated one applies at once: first in the environment, then in a directory,
then in Consul, which is read with a token of its own, below a root that no daemon's token can read.

Each value that was found is remembered by a `Redactor`. A text that a plugin or a remote system had a part in (an error
that becomes an event, a log line, a state) passes the redactor before it is published.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from controllers.tasks.api.errors import SecretNotFound, TaskError
from store.kv.protocol import Store, StoreError
from store.schema.keys import Keys

ENV_PREFIX = "RCFARM_SECRET_"
MAX_SECRET = 64 * 1024  # bytes
REDACTED = "[redacted]"
_SHORTEST = 4  # characters; replacing shorter values would garble texts and give away nothing less
_REMEMBERED = 1024  # values; rotated ones are forgotten in the order of their last use
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class BadSecret(TaskError, ValueError):
    """An invalid key, or a value that is no text or too long; the message names the place, never the value."""

    retryable = False


class SecretUnavailable(TaskError):
    """A place could not be read. The places after it are not asked: they may hold another value."""


class SecretValue(str):
    """A secret. It is a text like any other, but its `repr` is redacted and JSON encoders of records refuse it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return REDACTED


class Redactor:
    """Replaces the values of secrets in texts by `REDACTED`, also where they are quoted for URLs, JSON, base64 or
    `repr`. Values under four characters are left. Every line of a value with several lines counts as a value."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, None] = OrderedDict()
        self._forms: list[str] | None = None  # of all values

    def remember(self, value: str) -> None:
        """Replace `value` from now on."""
        for each in {value, value.strip(), *(line.strip() for line in value.splitlines())}:
            if len(each) < _SHORTEST:
                continue
            if each not in self._values:
                self._forms = None
            self._values[each] = None
            self._values.move_to_end(each)
        while len(self._values) > _REMEMBERED:
            self._values.popitem(last=False)
            self._forms = None

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        if self._forms is None:
            self._forms = list({form for value in self._values for form in _forms(value)})
        found = [form for form in self._forms if form in text]  # much faster than one pattern of thousands of forms
        if not found:
            return text
        return re.sub("|".join(map(re.escape, sorted(found, key=len, reverse=True))), REDACTED, text)

    def value(self, value: Any) -> Any:
        """Return a copy of a value of dicts, lists, tuples and scalars without secrets, in keys also."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            return self.text(value.decode(errors="replace")).encode() if self._values else value
        if isinstance(value, Mapping):
            return {self.value(name): self.value(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.value(each) for each in value]) if type(value) in (list, tuple) else value
        return value

    def process(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Redact a log event; a processor of structlog, for the place after the one that formats exceptions."""
        if not self._values:
            return event
        for name, value in event.items():
            plain = isinstance(value, str | bytes | int | float | bool | None | Mapping | list | tuple)
            event[name] = self.value(value) if plain else self.text(str(value))
        return event


class SecretManager:
    """Secrets by key, from the first of the places that has it.

    - the variable `<env_prefix><key>` of `environ`,
    - the file `<directory>/<key>`, if there is a directory; one line feed at its end is not part of the value,
    - the key `<root>-secrets/<key>` of `store`, if there is one: opened with a token that may read only that.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] = os.environ,
        env_prefix: str = ENV_PREFIX,
        directory: Path | None = None,
        store: Store | None = None,
        keys: Keys | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self.redactor = redactor or Redactor()
        self._environ, self._env_prefix, self._directory = environ, env_prefix, directory
        self._store, self._keys = store, keys or Keys()

    def __repr__(self) -> str:
        return f"SecretManager({self._env_prefix}…, {self._directory}, {self._keys.secrets})"

    async def get(self, key: str) -> SecretValue:
        """Return the secret. Raises `SecretNotFound`, naming all places, `SecretUnavailable`, naming the one that
        failed, and `BadSecret` for an invalid key or value."""
        if _KEY.fullmatch(key) is None:
            raise BadSecret(f"{key[:130]!r} can't be the key of a secret: 1 to 128 ASCII letters, digits and _.- are")
        value = self._environ.get(f"{self._env_prefix}{key}")
        if value is None and self._directory is not None:
            value = await asyncio.to_thread(_from_file, key, self._directory / key)
        if value is None and self._store is not None:
            value = await self._from_store(key, self._store)
        if value is None:
            places = [f"the environment ({self._env_prefix}{key})"]
            places.append(f"the file {self._directory / key}" if self._directory else "no directory (none is set)")
            places.append(f"the store ({self._keys.secret(key)})" if self._store else "no store (none is set)")
            raise SecretNotFound(f"secret {key}: not found in {', '.join(places)}")
        self.redactor.remember(value)
        return SecretValue(value)

    async def _from_store(self, key: str, store: Store) -> str | None:
        place = self._keys.secret(key)
        try:
            entry = await store.get(place)
        except StoreError as error:
            raise SecretUnavailable(f"secret {key}: the store's key {place} can't be read: {error}") from error
        return _decoded(key, place, entry.value) if entry is not None else None


def _from_file(key: str, path: Path) -> str | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # links are followed: kubelet mounts them
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SecretUnavailable(f"secret {key}: {path} can't be read: {os.strerror(error.errno or 0)}") from None
    with open(file, "rb") as opened:
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            content = opened.read(MAX_SECRET + 1)
        except OSError as error:
            raise SecretUnavailable(f"secret {key}: {path} can't be read: {error.strerror}") from None
    return _decoded(key, str(path), content.removesuffix(b"\n"))


def _decoded(key: str, place: str, value: bytes) -> str:
    if len(value) > MAX_SECRET:
        raise BadSecret(f"secret {key}: {place} has more than {MAX_SECRET} bytes")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadSecret(f"secret {key}: {place} is not UTF-8 text; store binary values as base64") from None


def _forms(value: str) -> set[str]:
    """Return the value as it stands in texts: itself, and quoted as URLs, JSON, base64 and `repr` quote it."""
    encoded = base64.b64encode(value.encode(errors="surrogateescape")).decode().rstrip("=")
    forms = {value, quote(value, safe="", errors="replace"), quote(value, errors="replace")}
    forms |= {quote_plus(value, errors="replace"), encoded, encoded.translate(str.maketrans("+/", "-_"))}
    forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    return forms
