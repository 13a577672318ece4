"""What a drain says about each pod, and why."""

from __future__ import annotations

from typing import Any

import pytest

from rcfarm.operations.drains import PodAt, departures, stuck
from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_snapshot import OwnerView, RCSnapshot
from store.schema.records import (
    ALL_NODES,
    TASK_LABEL,
    Brake,
    Intent,
    Mutation,
    NodeAlive,
    NodeSpec,
    RCSpec,
    RCState,
    RCStatus,
    Reason,
    Rollout,
)

ALIVE = NodeAlive("agent", "")
OWNED = OwnerView("farm-a", session="s")


def fleet(**specs: Any) -> dict[str, NodeView]:
    names = ["node-1", "node-2", "node-3"]
    return {name: NodeView(NodeSpec(name=name, **specs.get(name, {})), ALIVE, ALIVE) for name in names}


def rc(**fields: Any) -> RCSnapshot:
    wanted: dict[str, Any] = {"replicas_desired": 1, "allocation_strategy": "dynamic"} | fields
    return RCSnapshot("web", RCSpec(id="web", manifest="m", **wanted), owner=OWNED, pods={"node-1": {}})


def said(snap: RCSnapshot, brake: Brake | None = None, **specs: Any) -> tuple[str, str]:
    pod = PodAt("node-1", "web", Intent(manifest="m", rc="web", shard="00"))
    (found,) = departures([pod], {"web": snap}, fleet(**specs), brake, ["node-1"])
    return found.kind, found.waits_for


CORDONED = {"schedulable": False}


@pytest.mark.parametrize(
    ("snap", "specs", "kind"),
    [
        (rc(), {}, "moves"),
        (rc(), {"node-2": CORDONED, "node-3": CORDONED}, "no_place"),
        (rc(node_selector="pool=db"), {}, "no_place"),
        (rc(node_selector="pool=db"), {"node-3": {"labels": {"pool": "db"}}}, "moves"),
        (rc(allocation_strategy="static"), {}, "static"),
        (rc(disabled=True), {}, "disabled"),
        (rc(replicas_desired=ALL_NODES), {}, "leaves"),
        (rc(replicas_desired=ALL_NODES, tolerate_drain=True), {}, "tolerant"),
        (rc(allocation_strategy="static", deleting=True), {}, "leaves"),
        (RCSnapshot("web"), {}, "unreadable"),
    ],
)
def test_each_kind(snap: RCSnapshot, specs: dict[str, Any], kind: str) -> None:
    assert said(snap, **specs)[0] == kind


def test_what_it_waits_for() -> None:
    """The brake before all; then an owner, a lock, and a rollout."""
    rollout = Rollout(revision=1, manifest="m", state="rolling", since="", started="", progressed="")
    brake = Brake(farm="", since="", code="engaged", message="m", by="ada")
    assert "rcfarm brake status" in said(rc(), brake)[1]
    assert "farm that owns" in said(rc()._replace(owner=OwnerView()))[1]
    assert said(rc()._replace(mutation=Mutation("ada", "", "")))[1].startswith("ada, which holds the mutation lock")
    assert said(rc()._replace(rollout=rollout))[1].startswith("its rollout of revision 1")
    assert said(rc())[1] == ""


def test_a_pod_of_a_task_ends_with_it() -> None:
    pod = PodAt("node-1", "p", Intent(manifest="m", rc="", shard="00", labels={TASK_LABEL: "nightly"}))
    (found,) = departures([pod], {}, fleet(), None)
    assert (found.kind, found.task, found.act) == ("ends", "nightly", "`rcfarm task abort nightly` ends it at once")


@pytest.mark.parametrize(
    ("state", "code", "is_stuck"),
    [
        ("progressing", "transfer_in_progress", False),
        ("progressing", "transfer_waits_for_health", False),
        ("converged", "allocation_failed", True),
        ("held", "held", True),
        ("quarantined", "failing", True),
    ],
)
def test_which_reasons_end_the_waiting(state: RCState, code: str, is_stuck: bool) -> None:
    """What passes without an operator is waited for."""
    reason = Reason(code, "why")
    status = RCStatus(
        state=state, generation=1, desired=1, placed=1, healthy=1, farm="farm-a", token=1, reasons=(reason,)
    )
    assert stuck(rc()._replace(status=status)) == ("why" if is_stuck else "")
