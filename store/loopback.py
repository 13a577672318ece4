"""Which hosts are this machine's own loopback."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether the name or address is one of this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
