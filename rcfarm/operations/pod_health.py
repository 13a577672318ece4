"""Why the pods of an RC are not healthy, as reasons that its owner stores; pure.

Each pod that is not healthy is in one class, and each class is one `Reason`: how many pods, and the causes of the first
few. Agents publish a condition seldom (see `store.schema.records.Health`), so the reasons change seldom, too.

`state_word` depends only on the stored status, so the command line and the metrics use the same word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from scheduler.protocol import Absence
from store.schema.records import Health, HealthState, RCSpec, RCState, RCStatus, Reason

SHOWN_PODS = 3  # whose cause is in the message
REASON_NODES = 10  # nodes listed in a reason; the message says how many there are
_SHOWN = 200  # characters of a cause

UNHEALTHY = frozenset({"crashing", "blocked", "unhealthy", "node_dead"})
TROUBLE = UNHEALTHY | {"failed", "restarted"}  # shown to operators in every state of the RC
HEALTH_CODES = TROUBLE | {"starting"}

State = RCState | Literal["unhealthy", "failed", "completed"]


class Placement(NamedTuple):
    """One pod of the RC: the manifest of its intent (None: the intent is lost), and its health on that manifest.

    `verdict`: its agent's health record, for any manifest; None while there is none.
    """

    manifest: str | None
    health: HealthState = "unknown"
    verdict: Health | None = None


class PodHealth(NamedTuple):
    """A summary of pods. `away`: how many do not pass; `completed`: how many pass because their processes ended with
    success."""

    reasons: tuple[Reason, ...]
    away: int
    completed: int


def pod_health(
    spec: RCSpec,
    current: Mapping[str, Placement],
    kept: Iterable[str],
    added: Iterable[str],
    absent: Mapping[str, Absence],
) -> PodHealth:
    """Classify the pods that stay and those that are about to be placed. `absent`: nodes with a dead agent."""
    classes: dict[str, list[str]] = {}
    away = completed = total = 0
    for node in kept:
        total += 1
        placement = current[node]
        away += placement.health != "passing"
        completed += placement.health == "passing" and _condition(placement) == "completed"
        if code := _class(placement, is_absent=node in absent):
            classes.setdefault(code, []).append(node)
    for node in added:
        total, away = total + 1, away + 1
        classes.setdefault("starting", []).append(node)
    reasons = [_reason(code, sorted(classes[code]), total, spec, current, absent) for code in _ORDER if code in classes]
    return PodHealth(tuple(reasons), away, completed)


def state_word(status: RCStatus) -> State:
    """Return the status's state, refined: unhealthy or failed while it progresses, completed when converged."""
    codes = {reason.code for reason in status.reasons}
    if status.state == "progressing" and "failed" in codes:
        return "failed"
    if status.state == "progressing" and codes & UNHEALTHY:
        return "unhealthy"
    if status.state == "converged" and 0 < status.placed == status.completed:
        return "completed"
    return status.state


def describe(verdict: Health) -> str:
    """Return why the pod does not pass, in one line."""
    if not verdict.condition or not verdict.cause:
        output = " ".join(verdict.output.split())[:_SHOWN]
        return f"{verdict.status}: {output}" if output else verdict.status
    count = verdict.restarts
    restarts = f" ({'at least ' if count > 1 else ''}{count} restart{'s' if count > 1 else ''})" if count else ""
    return " ".join(verdict.cause.split())[:_SHOWN] + restarts


def _condition(placement: Placement) -> str:
    """Return the pod's condition if it is about its intent's manifest, else ""."""
    verdict = placement.verdict
    return verdict.condition if verdict and verdict.manifest == placement.manifest else ""


def _class(placement: Placement, *, is_absent: bool) -> str:
    verdict, passes = placement.verdict, placement.health == "passing"
    if verdict and verdict.condition == "blocked":
        return "blocked"
    if passes:
        return "restarted" if _condition(placement) == "restarted" else ""
    if is_absent:
        return "node_dead"
    if (condition := _condition(placement)) in ("crashing", "failed"):
        return condition
    return "unhealthy" if verdict and verdict.manifest == placement.manifest else "starting"


_SENTENCES: dict[str, tuple[str, str]] = {  # for one pod, for several
    "failed": ("has failed and is not restarted", "have failed and are not restarted"),
    "blocked": ("can't be reconciled with its manifest", "can't be reconciled with their manifest"),
    "crashing": ("crashes", "crash"),
    "node_dead": ("is on a node whose agent does not answer", "are on nodes whose agents do not answer"),
    "unhealthy": ("does not pass", "do not pass"),
    "starting": ("is not reported by its agent yet", "are not reported by their agents yet"),
    "restarted": ("passes, but has crashed repeatedly", "pass, but have crashed repeatedly"),
}
_ORDER = tuple(_SENTENCES)


def _reason(
    code: str,
    nodes: list[str],
    total: int,
    spec: RCSpec,
    current: Mapping[str, Placement],
    absent: Mapping[str, Absence],
) -> Reason:
    sentence = f"{len(nodes)} of {total} {'pod' if total == 1 else 'pods'} {_SENTENCES[code][len(nodes) > 1]}"
    listed = tuple(nodes[:REASON_NODES])
    if code == "starting":
        return Reason(code, f"{sentence}: {_listed(nodes)}", listed)
    if code == "node_dead":
        awaited = [absent[node].lost_at for node in nodes if not absent[node].is_lost]
        if spec.allocation_strategy == "static":
            then, until = "a static RC keeps its pods there: start the agent", ""
        elif awaited:
            then, until = "unless it comes back, the node is lost and its pod is moved", min(awaited)
        else:
            then, until = "the node is lost: its pod is moved as soon as there is another node for it", ""
        message = f"{sentence}: {_listed(nodes)}; {then}"
        return Reason(code, message, listed, min(absent[node].since for node in nodes), until)
    verdicts = {node: verdict for node in nodes if (verdict := current[node].verdict)}
    by_cause: dict[str, list[str]] = {}
    for node, verdict in verdicts.items():
        by_cause.setdefault(describe(verdict), []).append(node)
    causes = [f"{_listed(where)}: {cause}" for cause, where in list(by_cause.items())[:SHOWN_PODS]]
    causes += [f"and {len(by_cause) - SHOWN_PODS} other causes"] if len(by_cause) > SHOWN_PODS else []
    since = min((verdict.since for verdict in verdicts.values() if verdict.status != "passing"), default="")
    return Reason(code, f"{sentence}: {'; '.join(causes)}", listed, since)


def _listed(nodes: list[str]) -> str:
    more = f" and {len(nodes) - SHOWN_PODS} more" if len(nodes) > SHOWN_PODS else ""
    return ", ".join(nodes[:SHOWN_PODS]) + more
