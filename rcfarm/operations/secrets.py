"""Operators' verbs on the secrets in Consul. Their values go in and are not shown again."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rcfarm.operations.errors import BadInput, Contended, NotFound
from store.kv import ops
from store.kv.protocol import BadRecord, Store
from store.schema import audit
from store.schema.keys import Keys
from store.schema.manifest import BadManifest, parse
from store.schema.records import RCSpec, decode
from store.schema.secrets import MAX_SECRET, BadVariables, is_secret_key, parse_variables


class SecretView(NamedTuple):
    """A secret. `variables`: their names; None if it has no lines of NAME=value, as pods need them. `rcs`: whose pods
    are to get it."""

    name: str
    variables: list[str] | None
    rcs: list[str]


class Secrets:
    """Reads and changes secrets. `actor`: named in the audit log. The store's errors pass through."""

    def __init__(
        self, store: Store, keys: Keys, *, actor: str | audit.Actor = "", rng: random.Random | None = None
    ) -> None:
        self._store, self._keys, self._actor = store, keys, actor
        self._rng = rng or random.Random()

    async def set(self, name: str, content: bytes, *, plain: bool = False) -> bool:
        """Write a secret. Return whether that changed anything. `plain`: it is one value, for a plugin of tasks, and
        not lines of NAME=value. Raises `BadInput`, `Contended`."""
        check_name(name)
        try:
            variables = None if plain else sorted(parse_variables(content))
        except BadVariables as error:
            raise BadInput(f"secret {name}: {error}") from None
        if len(content) > MAX_SECRET:
            raise BadInput(f"secret {name}: has more than {MAX_SECRET} bytes")
        if variables == []:
            raise BadInput(f"secret {name}: has no line NAME=value")

        async def attempt() -> bool:
            old = await self._store.get(self._keys.secret(name), consistent=True)
            if old is not None and old.value == content:
                return False
            details = {"secret": name} | ({"variables": variables} if variables else {})
            writing = ops.cas(self._keys.secret(name), content, old.modify_index if old else 0)
            await self._store.txn([writing, audit.event_op(self._keys, "SECRET_SET", details, actor=self._actor)])
            return True

        return await ops.retry_conflicts(f"secret {name}", attempt, rng=self._rng, error=Contended)

    async def delete(self, name: str, *, force: bool = False) -> None:
        """Remove a secret. Raises `NotFound`; `BadInput` if pods are to get it, unless `force`."""
        check_name(name)

        async def attempt() -> None:
            old = await self._store.get(self._keys.secret(name), consistent=True)
            if old is None:
                raise NotFound(f"there is no secret {name}; `rcfarm secret list` shows those that exist")
            if not force and (rcs := (await self._used()).get(name)):
                raise BadInput(
                    f"secret {name}: pods of {', '.join(sorted(rcs))} could not start without it: change their "
                    "manifests first, or use --force"
                )
            event = audit.event_op(self._keys, "SECRET_DELETED", {"secret": name}, actor=self._actor)
            await self._store.txn([ops.delete_cas(old.key, old.modify_index), event])

        await ops.retry_conflicts(f"secret {name}", attempt, rng=self._rng, error=Contended)

    async def list(self) -> list[SecretView]:
        """Return every secret, in order of name."""
        listed, used = await asyncio.gather(self._store.list(self._keys.secrets, consistent=True), self._used())
        views = []
        for entry in sorted(listed.entries, key=lambda entry: entry.key):
            try:
                variables: list[str] | None = sorted(parse_variables(entry.value))
            except BadVariables:
                variables = None
            if name := entry.key.removeprefix(self._keys.secrets):
                views.append(SecretView(name, variables, sorted(used.get(name, ()))))
        return views

    async def _used(self) -> Mapping[str, Collection[str]]:
        """Return the RCs whose manifests name secrets, by secret."""
        keys, store = self._keys, self._store
        manifests, records = await asyncio.gather(store.list(keys.manifests), store.list(keys.rcs))
        naming: dict[str, Collection[str]] = {}
        for entry in manifests.entries:
            if b"env_from" in entry.value:
                try:
                    launchables = parse(entry.value).launchables.values()
                except BadManifest:
                    continue
                sources = {each.consul for launchable in launchables for each in launchable.secrets if each.consul}
                naming[keys.name_of(entry.key)] = sources
        used: defaultdict[str, list[str]] = defaultdict(list)
        for entry in records.entries if naming else ():
            if keys.is_spec(entry.key):
                try:
                    spec = decode(RCSpec, entry.key, entry.value)
                except BadRecord:
                    continue
                for name in naming.get(spec.manifest, ()):
                    used[name].append(spec.id)
        return used


def check_name(name: str) -> None:
    """Raises `BadInput` for a name that no secret can have."""
    if not is_secret_key(name):
        raise BadInput(f"{name!r} can't name a secret; a name has 1 to 128 ASCII letters, digits, '_', '.' and '-'")
