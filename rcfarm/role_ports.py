"""Where the daemons listen for `/livez`, `/readyz` and `/metrics`, unless `web.listen` says otherwise."""

from __future__ import annotations

from collections.abc import Mapping

PORTS: Mapping[str, int] = {"dev": 9700, "farm": 9701, "agent": 9702, "jobs": 9703, "extender": 9704}
"""The port on loopback by role."""
