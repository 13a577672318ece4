"""Every decoder of what others write: what it reads, the errors that it may raise, and good texts to damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from scheduler.reservations import NodeReservations, Reservation
from store import records
from store.manifest import BadManifest, parse
from store.records import BadRecord, Capacity, Exit, NodeTransfer, Process, Reason, decode, decode_labels, encode

TIME = "2026-01-01T00:00:00Z"
SHA = "c" * 64


class Decoder(NamedTuple):
    """`read` raises one of `errors` and nothing else, for any bytes. `seeds`: texts that it can read."""

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


_GOOD: tuple[msgspec.Struct, ...] = (
    records.Meta(),
    records.RCSpec(id="web", manifest=SHA, replicas_desired=3, node_selector="a=b", pod_labels={"tier": "web"}),
    records.Owner("farm-1", TIME),
    records.Mutation("alice", "an edit", TIME),
    records.RCStatus(
        state="short",
        generation=7,
        desired=3,
        placed=2,
        healthy=1,
        farm="farm-1",
        token=42,
        reasons=[Reason("no_nodes", "no node is left", ["node-1"])],
        node_transfer=NodeTransfer("t", "node-1", "node-2"),
        updated_at=TIME,
    ),
    records.Health("passing", SHA, "ok", TIME),
    records.NodeSpec(name="node-1", labels={"pool": "web"}, capacity=Capacity(4000, 2**34, {"gpu": 8}), evict=True),
    records.NodeAlive("node-1", TIME, "10.0.0.1", "0.1.0"),
    records.Intent(manifest=SHA, rc="web", shard="0a", token=9, labels={"tier": "web"}),
    records.Reality(
        manifest=SHA,
        rc="web",
        state="running",
        launchables={"main": Process(state="backoff", pid=4, restarts=2, last_exit=Exit(TIME, 1, "SIGKILL"))},
        ports={"http": 8080},
    ),
    records.FarmMember(farm="farm-1", selector="a=b", since=TIME),
    records.Brake(farm="farm-1", since=TIME, code="no_rcs_found", message="gone"),
    records.AuditEvent(event_type="SCALED", event_details={"rc": "web", "changes": [1, 2.5, None]}, timestamp=TIME),
    NodeReservations({"web": Reservation(request=Capacity(100, 2**20, {"gpu": 1}), selector="a=b", releasing=True)}),
)

MANIFEST_JSON = (
    b'{"id":"web","launchables":{"main":{"command":["sleep","9"],"env":{"A":"1"},"stop_timeout":2.5,"artifact":'
    b'{"url":"https://a/b","sha256":"%s"},"resources":{"cpu":100,"memory":1048576,"devices":{"gpu":1}}}},'
    b'"config":{"a":[1,2.5,{"b":null}]},"ports":{"http":0},"health":{"http":{"port":"http"},"interval":1}}'
) % SHA.encode()
MANIFEST_YAML = (
    b"id: web\nlaunchables:\n  main: &main\n    command: [sleep, '9']\n    resources: {cpu: 100}\n"
    b"config:\n  a: [1, 2.5, {b: null}]\n  when: 2026-01-01\nports: {http: 0}\nhealth: {tcp: {port: http}}\n"
)


def _record(good: msgspec.Struct) -> Decoder:
    """What was read can also be written again, and is then the same."""
    kind = type(good)

    def read(raw: bytes) -> object:
        found = decode(kind, "a/key", raw)
        again = decode(kind, "a/key", encode(found))
        assert again == found, (again, found)
        return found

    return Decoder(read, (BadRecord,), (encode(good),))


def _labels(raw: bytes) -> Any:
    return decode_labels("a/key", raw)


RECORDS: dict[str, Decoder] = {
    **{type(good).__name__: _record(good) for good in _GOOD},
    "Labels": Decoder(_labels, (BadRecord,), (b'{"pod_id":"web","replication_controller_id":"web"}',)),
    "Manifest": Decoder(parse, (BadManifest,), (MANIFEST_JSON, MANIFEST_YAML)),
}
DECODERS: dict[str, Decoder] = {**RECORDS}
