"""Where the extender listens, as HiveD's file has it: in Go's form."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.hived.errors import ConfigError

PATH = "webServerAddress"


def host_and_port(text: str) -> tuple[str, int]:
    """`:PORT` is all addresses, host "". Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ConfigError(PATH, f"{text!r} is not :PORT, HOST:PORT or [IPV6]:PORT; HiveD's is :9096")
    return host, int(port)


def problems_of_address(text: str) -> Iterator[ConfigError]:
    """What is wrong with it, if anything."""
    try:
        host_and_port(text)
    except ConfigError as error:
        yield error
