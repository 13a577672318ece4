"""Where a running rcfarm that owns an embedded store can be reached: `endpoint.json` in its state directory.

Whoever serves the Consul API over an embedded store writes the file (mode 0600, in one step) once it listens, and
removes it when it stops. Others on the machine that want the same store find it there, instead of the locked file.

The port is noted beside it, for good: after a restart the store is served there again, because programs that were given
the address (agents above all) don't look anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from store.kv import Unavailable

ENDPOINT_FILE = "endpoint.json"
PORT_FILE = "endpoint.port"


class Endpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """`url` as `--store` takes it (`consul://HOST:PORT`); `pid` of the process that serves it."""

    url: str
    pid: int
    token: str = ""

    def __repr__(self) -> str:
        return f"Endpoint(url={self.url!r}, pid={self.pid})"

    @property
    def is_served(self) -> bool:
        """Whether the process is still there."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def dev_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The state directory of `rcfarm dev`, unless it is told another."""
    home = environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "rcfarm" / "dev"


def write_endpoint(directory: Path, endpoint: Endpoint) -> None:
    """Tell others where the store of `directory` is served."""
    path = directory / ENDPOINT_FILE
    draft = path.with_suffix(f".{endpoint.pid}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(endpoint))
    draft.replace(path)
    (directory / PORT_FILE).write_text(endpoint.url.rpartition(":")[2])


def former_port(directory: Path) -> int:
    """The port on which the store of `directory` was served last; 0 when it never was, or that can't be told."""
    try:
        port = int((directory / PORT_FILE).read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 65536 else 0


def read_endpoint(directory: Path) -> Endpoint | None:
    """What was written there last, or None. Raises `Unavailable` for a file that can't be read."""
    path = directory / ENDPOINT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Endpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise Unavailable(f"{path} can't be read: {error}") from error


def remove_endpoint(directory: Path) -> None:
    """The store is no longer served; nothing happens when the file is gone."""
    (directory / ENDPOINT_FILE).unlink(missing_ok=True)
