"""`tests.chaos.convergence`: a converged fleet has no shortcomings, and each shortcoming is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from store.kv.protocol import Entry
from store.schema.keys import Keys
from store.schema.records import Health, Intent, NodeAlive, NodeSpec, Owner, Process, RCSpec, RCStatus, Reality, encode
from tests.chaos.convergence import shortcomings
from tests.chaos.site import PodProcess
from tests.chaos.snapshot import Snapshot

KEYS = Keys()
LABELS = {"pod_id": "web"}
RUNNING = [PodProcess("n1", "web", 7)]
SPEC = RCSpec(id="web", manifest="m", replicas_desired=1, rc_labels=LABELS, node_selector="pool=web")
STATUS = RCStatus(state="converged", generation=1, desired=1, placed=1, healthy=1, farm="f1", token=1)
REALITY = Reality(manifest="m", rc="web", state="running", launchables={"main": Process(state="running", pid=7)})


def fleet(**changes: Any) -> dict[str, Entry]:
    """Return a farm, two nodes, and an RC of one pod. `changes`: records, or None for one that is not there."""
    records = {
        "farm": (KEYS.farm("f1"), b"{}", "farm"),
        "spec": (KEYS.spec("web"), SPEC, None),
        "owner": (KEYS.owner("web"), Owner("f1", ""), "farm"),
        "status": (KEYS.status("web"), STATUS, None),
        "pod": (KEYS.pod("web", "n1"), LABELS, None),
        "intent": (KEYS.intent("n1", "web"), Intent(manifest="m", rc="web", shard="00", labels=LABELS), None),
        "reality": (KEYS.reality("n1", "web"), REALITY, None),
        "health": (KEYS.health("web", "n1"), Health("passing", "m"), "n1"),
        "n1": (KEYS.node_spec("n1"), NodeSpec(name="n1", labels={"pool": "web"}), None),
        "n2": (KEYS.node_spec("n2"), NodeSpec(name="n2"), None),
        "n1_alive": (KEYS.node_alive("n1"), NodeAlive("a", ""), "n1"),
        "n2_alive": (KEYS.node_alive("n2"), NodeAlive("a", ""), "n2"),
    }
    found = {}
    for name, (key, record, session) in records.items():
        record = changes.get(name, record)
        if record is not None:
            value = record if isinstance(record, bytes) else encode(record)
            found[key] = Entry(key, value, 1, 1, lock_index=1 if session else 0, session=session)
    return found


def found(processes: list[PodProcess] = RUNNING, **changes: Any) -> list[str]:
    snapshot = Snapshot(KEYS, fleet(**changes).values())
    assert snapshot.malformed == []
    return shortcomings(snapshot, processes, ["f1"], ["n1", "n2"])


def test_a_converged_fleet_has_none() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"farm": None}, "farm f1 is no member"),
        ({"n2_alive": None}, "node n2 is not alive"),
        ({"owner": None}, "it has no owner"),
        ({"spec": None}, "its folder is there"),
        ({"status": msgspec.structs.replace(STATUS, token=2)}, "status is of generation 1"),
        ({"spec": msgspec.structs.replace(SPEC, manifest="n")}, "the intent on n1 is not of its manifest"),
        ({"spec": msgspec.structs.replace(SPEC, replicas_desired=2, node_selector="")}, "1 pods are missing, and n2"),
        ({"spec": msgspec.structs.replace(SPEC, replicas_desired=0)}, "1 pods too many"),
        ({"reality": None}, "no reality"),
        ({"reality": msgspec.structs.replace(REALITY, launchables={})}, "reality names other processes than 7"),
        ({"health": None}, "no health under its agent's session"),
        ({"health": Health("critical", "m")}, "health is critical"),
        ({"intent": None, "pod": None}, "no intent, and 1 processes"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], what: str) -> None:
    assert any(what in one for one in found(**changes))


def test_processes_are_those_of_the_intents() -> None:
    assert found([]) == ["pod web on n1: 0 processes", "pod web on n1: reality names other processes than None"]
    assert "pod other on n2: no intent, and 1 processes" in found([*RUNNING, PodProcess("n2", "other", 8)])


def test_a_shortage_of_nodes_is_no_shortcoming() -> None:
    """Two replicas are desired, and one node matches: the status reports the shortage."""
    short = msgspec.structs.replace(STATUS, state="short", desired=2)
    assert found(spec=msgspec.structs.replace(SPEC, replicas_desired=2), status=short) == []
