"""The address of a running rcfarm that owns an embedded store: `endpoint.json` in its state directory.

The process that serves the Consul API over an embedded store writes the file (mode 0600, in one step) once it listens,
and removes it when it stops. Other processes on the machine that want the same store find it there, instead of the
locked file.

Two files beside it stay when the process stops, because the programs that use their contents (agents above all) do not
read them again: the port, on which the store is served again after a restart, and the token that the API requires. The
token is random, of one store, and readable by the store's user alone (mode 0600), who can read the store anyway.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from store.decoding import Undecodable, from_json, json_decoder
from store.kv.protocol import Unavailable

ENDPOINT_FILE = "endpoint.json"
PORT_FILE = "endpoint.port"
TOKEN_FILE = "endpoint.token"
_TOKEN_BYTES = 24


class Endpoint(msgspec.Struct, frozen=True):
    """`url` as `--store` takes it (`consul://HOST:PORT`); `pid` of the process that serves it."""

    url: str
    pid: int

    @property
    def is_served(self) -> bool:
        """Return whether the process still exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def dev_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default state directory of `rcfarm dev`.

    A user without a home, as a service of systemd's may be, has it below `/`, where there is none.
    """
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state").removeprefix("~")
    return Path(state) / "rcfarm" / "dev"


def write_endpoint(directory: Path, endpoint: Endpoint) -> None:
    """Publish the address at which the store of `directory` is served. Raises `Unavailable`."""
    path = directory / ENDPOINT_FILE
    temporary = path.with_suffix(f".{endpoint.pid}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(endpoint))
        temporary.replace(path)
        (directory / PORT_FILE).write_text(endpoint.url.rpartition(":")[2])
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise Unavailable(f"{path} can't be written: {error.strerror}") from error


def store_token(directory: Path) -> str:
    """Return the token of the store in `directory`; the first call creates it. Raises `Unavailable`."""
    path = directory / TOKEN_FILE
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
        path.chmod(0o600, follow_symlinks=True)
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unavailable(f"the store's token can't be read or written: {error}") from error
    if not token:
        raise Unavailable(f"{path} is empty; remove it, so that a new token is made")
    return token


def former_port(directory: Path) -> int:
    """Return the port on which the store of `directory` was last served; 0 when there is none, or it is unknown."""
    try:
        port = int((directory / PORT_FILE).read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 65536 else 0


def read_endpoint(directory: Path) -> Endpoint | None:
    """Return the endpoint in `directory`, or None. Raises `Unavailable` for a file that can't be read."""
    path = directory / ENDPOINT_FILE
    try:
        return from_json(json_decoder(Endpoint), path.read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (OSError, Undecodable) as error:
        raise Unavailable(f"{path} can't be read: {error}") from error


def remove_endpoint(directory: Path) -> None:
    """Remove the endpoint of a store that is no longer served; no error when the file is gone."""
    (directory / ENDPOINT_FILE).unlink(missing_ok=True)
