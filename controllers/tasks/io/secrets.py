"""Secrets for plugins.

A secret is looked up at each call, so a rotated one applies at once: first in the environment, then in a directory,
then in Consul, which is read with a token of its own, below a root that no daemon's token can read.

Each value that was found is remembered by a `store.redaction.Redactor`. A text that a plugin or a remote system had a
part in (an error that becomes an event, a log line, a state) passes the redactor before it is published.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from controllers.tasks.api.errors import SecretNotFound, TaskError
from store.kv.protocol import Store, StoreError
from store.redaction import REDACTED, Redactor
from store.schema.keys import Keys
from store.schema.secrets import MAX_SECRET, is_secret_key

ENV_PREFIX = "RCFARM_SECRET_"


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
        if not is_secret_key(key):
            raise BadSecret(
                f"{key[:130]!r} can't be the key of a secret; it has 1 to 128 ASCII letters, digits, '_', '.' and '-'"
            )
        value = self._environ.get(f"{self._env_prefix}{key}")
        if value is None and self._directory is not None:
            value = await asyncio.to_thread(_from_file, key, self._directory / key)
        if value is None and self._store is not None:
            place = self._keys.secret(key)
            try:
                entry = await self._store.get(place)
            except StoreError as error:
                raise SecretUnavailable(f"secret {key}: the store's key {place} can't be read: {error}") from error
            value = _decoded(key, place, entry.value) if entry is not None else None
        if value is None:
            places = [f"the environment ({self._env_prefix}{key})"]
            places.append(f"the file {self._directory / key}" if self._directory else "no directory (none is set)")
            places.append(f"the store ({self._keys.secret(key)})" if self._store else "no store (none is set)")
            raise SecretNotFound(f"secret {key}: not found in {', '.join(places)}")
        self.redactor.remember(value)
        return SecretValue(value)


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
