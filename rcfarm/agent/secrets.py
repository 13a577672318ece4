"""Secrets of pods: variables of processes whose values stand in no manifest, and so in no store, diff or log.

A launchable's `env_from` names where they are: a file of the node, below a directory of `agent.secret_files`, or a key
of Consul, `<root>-secrets/<key>`, which is beside the tree because every farm may read the tree. Either holds lines
`NAME=value`. They are read at each start of a process. A change reaches a process that runs only when it is started
again, as by `rcfarm rc restart`.

Messages name the place and the line, never what stands there.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from rcfarm.agent.errors import InstallFailed
from store.kv.protocol import Denied, Store
from store.schema.keys import Keys
from store.schema.manifest import Launchable
from store.schema.secrets import MAX_SECRET, BadVariables, parse_variables


class PodSecrets:
    """Reads what `env_from` names. `directories`: below which files may be read; `store`: with a token that may read
    the keys."""

    def __init__(self, store: Store, keys: Keys, directories: Sequence[str]) -> None:
        self._store, self._keys = store, keys
        self._directories = directories

    async def read(self, launchable: Launchable, at: str) -> dict[str, str]:
        """Return the variables of a launchable's `env_from`; of equal names the last one counts. Raises
        `InstallFailed`, which names the field and the place, and the store's errors."""
        found: dict[str, str] = {}
        for number, source in enumerate(launchable.secrets):
            where = f"{at}.env_from[{number}]"
            place = source.file or self._keys.secret(source.consul)
            try:
                if source.file:
                    content = await asyncio.to_thread(_read, Path(source.file), self._directories)
                else:
                    if (entry := await self._store.get(place)) is None:
                        raise InstallFailed(
                            f"{where}: there is no secret {source.consul}; `rcfarm secret set {source.consul} --file "
                            "FILE` makes it"
                        )
                    content = entry.value
                found |= parse_variables(content)
            except Denied as error:
                raise InstallFailed(
                    f"{where}: this agent's token may not read {place}; `rcfarm secret policy {source.consul}` prints "
                    "the policy that it needs"
                ) from error
            except BadVariables as error:
                raise InstallFailed(f"{where}: {place}: {error}") from None
            except OSError as error:
                raise InstallFailed(f"{where}: {place}: can't be read: {error.strerror or error}") from None
        return found


def _read(path: Path, directories: Sequence[str]) -> bytes:
    """Return a file's content, if it is in one of the directories, links resolved. Raises `BadVariables`,
    `OSError`."""
    real = path.resolve()  # what the directories hold is up to the operator, links out of them are not
    if not any(real.is_relative_to(Path(directory).resolve()) for directory in directories):
        raise BadVariables("this node does not allow secrets from there: add its directory to agent.secret_files")
    file = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise BadVariables("not a regular file")
        return opened.read(MAX_SECRET + 1)
