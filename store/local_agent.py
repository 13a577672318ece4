"""The part of a Consul agent that sessions rely on: services and their TTL checks.

A TTL check is passing until nobody has reported for its TTL; then it is critical, at once every session bound to it
ends, and `deregister_after` seconds later (if asked for) the service is removed. Checks of other kinds (HTTP, TCP,
scripts) are kept with the status that they were registered with, but are not run: nothing in an embedded store's
process reaches out to others.

Registrations live in memory. Only the checks that a session in the store's file is bound to come back after a restart,
so that their holders keep their sessions; whoever registers services for discovery registers them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import structlog

from store.embedded import EmbeddedStore
from store.embedded_state import CheckKind, SessionCheck
from store.kv import Invalid, Unavailable
from store.leases import Leases

SERF_HEALTH = "serfHealth"
STATUSES = ("passing", "warning", "critical")

log = structlog.get_logger(__name__)


@dataclass
class Check:
    """A check. `ttl` 0: it is of a kind that is not run. Durations in seconds."""

    id: str
    name: str
    ttl: float = 0.0
    status: str = "critical"
    output: str = ""
    notes: str = ""
    service_id: str = ""
    deregister_after: float = 0.0


@dataclass
class Service:
    """A service as it was registered."""

    id: str
    name: str
    tags: list[str] = field(default_factory=list)
    address: str = ""
    port: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


class LocalAgent:
    """Services and checks beside an embedded store."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.services: dict[str, Service] = {}
        self.checks: dict[str, Check] = {}
        self._store = store
        self._ttls = Leases(self._ttl_over, store.clock)
        self._removals = Leases(self._remove_critical, store.clock)

    def restore(self) -> None:
        """Take up the checks of sessions from before a restart; each has a full TTL from now."""
        for record in self._store.state.sessions.values():
            for bound in record.checks:
                if bound.ttl and bound.id not in self.checks:
                    self.add_check(Check(bound.id, bound.id, bound.ttl, "passing"))

    def close(self) -> None:
        """Stop the timers."""
        self._ttls.close()
        self._removals.close()

    def add_service(self, service: Service, checks: list[Check]) -> None:
        """Register a service with its checks, or register it anew."""
        self.services[service.id] = service
        for check in checks:
            self.add_check(check)

    def add_check(self, check: Check) -> None:
        """Register a check, or register it anew. Raises `Unavailable`."""
        self._forget_times(check.id)
        self.checks[check.id] = check
        self.report(check.id, check.status, check.output)

    def report(self, check_id: str, status: str, output: str = "") -> None:
        """Set a check's status and start its TTL again. Raises `KeyError`, and `Unavailable` with nothing reported."""
        check = self.checks[check_id]
        check.output = output
        if status == "critical":
            self._end_sessions(check_id)
            if check.deregister_after and check.service_id:
                self._removals.start(check_id, check.deregister_after)
        else:
            self._removals.drop(check_id)
        check.status = status
        if check.ttl:
            self._ttls.start(check_id, check.ttl)

    def remove_service(self, service_id: str) -> None:
        """Deregister a service and its checks; sessions bound to these end."""
        for check in [check for check in self.checks.values() if check.service_id == service_id]:
            self.remove_check(check.id)
        self.services.pop(service_id, None)

    def remove_check(self, check_id: str) -> None:
        """Deregister a check; sessions bound to it end."""
        if check_id in self.checks:
            self._end_sessions(check_id)
            self._forget_times(check_id)
            del self.checks[check_id]

    def bind(self, check_id: str, kind: CheckKind) -> SessionCheck:
        """What a new session notes of a check that it is bound to. Raises `Invalid` when it can't be bound to it."""
        if check_id == SERF_HEALTH:
            return SessionCheck(check_id, kind)
        check = self.checks.get(check_id)
        if check is None:
            raise Invalid(f"Missing check '{check_id}' registration")
        if check.status == "critical":
            raise Invalid(f"Check '{check_id}' is in critical state")
        return SessionCheck(check_id, kind, check.ttl)

    def _ttl_over(self, check_id: str) -> bool:
        try:
            self._end_sessions(check_id)
        except Unavailable as error:
            log.error("check is critical but its sessions can't be ended", check=check_id, error=str(error))
            return False
        check = self.checks[check_id]
        if check.status != "critical" and check.deregister_after and check.service_id:
            self._removals.start(check_id, check.deregister_after)
        check.status, check.output = "critical", "TTL expired"
        return True

    def _remove_critical(self, check_id: str) -> bool:
        try:
            self.remove_service(self.checks[check_id].service_id)
        except Unavailable as error:
            log.error("critical service can't be removed", check=check_id, error=str(error))
            return False
        return True

    def _end_sessions(self, check_id: str) -> None:
        for record in list(self._store.state.sessions.values()):
            if any(bound.id == check_id for bound in record.checks):
                self._store.end_session(record.id)

    def _forget_times(self, check_id: str) -> None:
        self._ttls.drop(check_id)
        self._removals.drop(check_id)
