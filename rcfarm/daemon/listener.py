"""The settings of a daemon's listener, read and checked before it listens (`rcfarm.daemon.health_server`)."""

from __future__ import annotations

from typing import NamedTuple

from rcfarm.config import token_in
from rcfarm.config.settings import BadSettings, WebSettings
from store.loopback import is_loopback

OFF = "off"


class Address(NamedTuple):
    """An address to listen on. Host "": all addresses. Port 0: a free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def parse_address(text: str, default_port: int, setting: str = "web.listen") -> Address | None:
    """Parse a listener's setting: None for `off`, loopback and the default port for "". Raises `BadSettings`."""
    if text == OFF:
        return None
    host, _, port = text.rpartition(":") if text else ("127.0.0.1", "", str(default_port))
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdigit() or int(port) > 65535 or ("/" in host):
        raise BadSettings(
            f"{setting}: {text!r} is not HOST:PORT, [IPV6]:PORT or off (all addresses: 0.0.0.0:{default_port})"
        )
    return Address(host, int(port))


def read_token(settings: WebSettings) -> str:
    """Return the token, from the settings or their file; "" for none. Raises `BadSettings`."""
    if not settings.token_file:
        return settings.token
    if settings.token:
        raise BadSettings("web.token and web.token_file are both set; keep one")
    return token_in("web.token_file", settings.token_file)


def listener(settings: WebSettings, default_port: int) -> tuple[Address | None, str]:
    """Return the address to listen on and the token. Raises `BadSettings` for one beyond loopback without a token."""
    address, token = parse_address(settings.listen, default_port), read_token(settings)
    if address and not address.is_loopback and not token:
        raise BadSettings(
            f"web.listen: {address.host} is reachable from other machines, so a token is required: set web.token_file "
            f"(or RCFARM_WEB_TOKEN), or listen on 127.0.0.1:{address.port}"
        )
    return address, token
