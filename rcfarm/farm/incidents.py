"""What a person is notified about, and in which words. Pure.

An incident is one of five: the brake is on, an RC fails, a rollout is stuck, a node is lost, the audit log can't be
written. Each has a key, by which a receiver knows that two events are about the same.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, NamedTuple

from rcfarm.operations.rc_snapshot import word_of
from store.schema.records import Brake, Incident, IncidentKind, RCSpec, RCStatus

Format = Literal["pagerduty", "json"]
MOST_OF_SUMMARY = 1000  # characters; PagerDuty takes 1024
MOST_OF_KEY = 255  # characters, for PagerDuty

FAILING = frozenset({"unhealthy", "failed", "quarantined"})
STUCK = ("rollout_stuck", "rollout_failed")
RUNBOOK: dict[IncidentKind, str] = {
    "brake": "the-brake-is-on",
    "rc": "rcs-unhealthy",
    "rollout": "rollouts-stuck",
    "node": "nodes-lost",
    "audit": "the-audit-log-cant-be-written",
}
COMMANDS: dict[IncidentKind, str] = {
    "brake": "rcfarm brake status",
    "rc": "rcfarm explain rc/{about}",
    "rollout": "rcfarm rollout status {about}",
    "node": "rcfarm explain node/{about}",
    "audit": "rcfarm doctor",
}


class Trouble(NamedTuple):
    """Something that is, or may become, an incident. `at_once`: it need not last first."""

    kind: IncidentKind
    about: str
    summary: str
    severity: Literal["critical", "error", "warning"]
    at_once: bool = True


def of_rc(spec: RCSpec | None, status: RCStatus | None) -> Trouble | None:
    """Return the trouble of an RC. A rollout that is stuck comes before the pods that fail because of it."""
    if spec is None or status is None or spec.disabled or spec.deleting or status.generation < spec.generation:
        return None
    if reason := next((each for each in status.reasons if each.code in STUCK), None):
        return Trouble("rollout", spec.id, _short(f"The rollout of rc {spec.id} is stuck: {reason.message}"), "error")
    word = word_of(status.state, status.reasons)
    if word not in FAILING:
        return None
    why = "; ".join(reason.message for reason in status.reasons)
    return Trouble("rc", spec.id, _short(f"rc {spec.id} is {word}: {why}"), "error", at_once=False)


def of_brake(brake: Brake | None, is_on: bool) -> Trouble | None:
    """Return the trouble that the brake is on. `brake` None while it is on: its record can't be read."""
    if not is_on:
        return None
    why = f"since {brake.since}: {brake.words}" if brake else "and its record can't be read"
    return Trouble("brake", "fleet", _short(f"The brake is on {why}. Nothing is removed or moved."), "critical")


def of_node(name: str) -> Trouble:
    """Return the trouble that a node is lost."""
    return Trouble(
        "node", name, f"Node {name} is lost: its agent does not answer, and its pods may be moved.", "warning"
    )


def of_audit(farm: str, problem: str) -> Trouble | None:
    """Return the trouble that a farm's changes can't be recorded, and therefore not be made."""
    if not problem:
        return None
    return Trouble("audit", farm, _short(f"Farm {farm} can't write the audit log: {problem}"), "critical")


def of_others(kind: IncidentKind, farm: str, number: int) -> Trouble:
    """Return the one trouble that stands for many further ones of its kind."""
    what = {"rc": "RCs fail", "rollout": "rollouts are stuck", "node": "nodes are lost"}.get(kind, f"incidents: {kind}")
    return Trouble(kind, f"others-of-{farm}", f"{number} further {what}; see `rcfarm status`", "error")


def body(incident: Incident, form: Format, *, installation: str, routing_key: str = "") -> dict[str, Any]:
    """Return the event that is sent: that the incident began, or, once it is resolved, that it ended."""
    action = "resolve" if incident.resolved else "trigger"
    key = key_of(incident, installation)
    if form == "json":
        return {
            "action": action,
            "key": key,
            "summary": incident.summary,
            "severity": incident.severity,
            "kind": incident.kind,
            "about": incident.about,
            "since": incident.since,
            "installation": installation,
            "farm": incident.farm,
            "command": _command(incident),
            "runbook": f"runbook.md#{RUNBOOK[incident.kind]}",
        }
    event: dict[str, Any] = {"routing_key": routing_key, "event_action": action, "dedup_key": key}
    if incident.resolved:
        return event
    payload = {
        "summary": incident.summary,
        "source": installation,
        "severity": incident.severity,
        "timestamp": incident.since,
        "component": incident.about,
        "class": incident.kind,
        "custom_details": {
            "farm": incident.farm,
            "command": _command(incident),
            "runbook": f"runbook.md#{RUNBOOK[incident.kind]}",
        },
    }
    return event | {"client": "rcfarm", "payload": payload}


def key_of(incident: Incident, installation: str) -> str:
    """Return the key by which a receiver knows the incident; of a long one the end is its digest."""
    key = f"{installation}/{incident.kind}/{incident.about}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    return key if len(key) <= MOST_OF_KEY else f"{key[: MOST_OF_KEY - 33]}-{digest[:32]}"


def _command(incident: Incident) -> str:
    return COMMANDS[incident.kind].format(about=incident.about)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_OF_SUMMARY else line[: MOST_OF_SUMMARY - 1] + "…"
