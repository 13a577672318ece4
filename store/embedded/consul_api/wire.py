"""The messages between Consul's clients and the façade, typed, and the parts of requests and answers that all share.

Go reads JSON member names whatever their case, takes null for absent, and clients rely on both, so requests other than
transactions are read with their names folded to lower case and without nulls. Values are base64; an empty one is null.
Whatever a body holds, the only error that it causes is `Invalid`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar, cast, get_args

import msgspec
from aiohttp import web

from store.decoding import Undecodable, converted, from_json
from store.embedded.state import SessionRecord
from store.kv.protocol import Entry, Invalid, Op, OpFailure, Verb

VERBS = frozenset(get_args(Verb))
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)"
_PARTS, _DURATION = re.compile(_PART), re.compile(rf"(?:{_PART})+|0")
_LONGEST_DURATION = 64  # characters
DEFAULT_WAIT = 300.0  # seconds, as Consul's
LONGEST_WAIT = 600.0
READ_HEADERS = {"X-Consul-KnownLeader": "true", "X-Consul-LastContact": "0"}
_MAX_UINT64 = (1 << 64) - 1
_DIGITS = 20  # of the largest number of 64 bits

Number = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]  # what any JSON reader and SQLite take
T = TypeVar("T", bound=msgspec.Struct)


class _Pair(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    lock_index: int
    key: str
    flags: int
    value: bytes | None
    session: str | msgspec.UnsetType
    create_index: int
    modify_index: int


class _Operation(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    verb: str = ""
    key: str = ""
    value: bytes | None = None
    index: int = 0
    session: str = ""
    flags: int = 0


class _Request(msgspec.Struct, frozen=True):
    kv: _Operation = msgspec.field(name="KV")


class SessionRequest(msgspec.Struct, frozen=True):
    """The body of `PUT /v1/session/create`. `nodechecks` None: the node's own health."""

    node: str = ""
    name: str = ""
    ttl: str = ""
    lockdelay: str | Number | float | None = None
    behavior: str = ""
    nodechecks: list[str] | None = None
    servicechecks: list[NamedCheck] = []
    checks: list[str] = []


class NamedCheck(msgspec.Struct, frozen=True):
    """A service's check that a session is bound to."""

    id: str = ""


class CheckRequest(msgspec.Struct, frozen=True):
    """The body of `PUT /v1/agent/check/register`, and a check within a service. Times as Go's text or nanoseconds."""

    id: str = ""
    checkid: str = ""
    name: str = ""
    ttl: str | Number = ""
    status: str = ""
    notes: str = ""
    serviceid: str = ""
    deregistercriticalserviceafter: str | Number = ""


class ServiceRequest(msgspec.Struct, frozen=True):
    """The body of `PUT /v1/agent/service/register`."""

    id: str = ""
    name: str = ""
    tags: list[str] = []
    address: str = ""
    port: Number = 0
    meta: dict[str, str] = {}
    check: CheckRequest | None = None
    checks: list[CheckRequest] = []


class UpdateRequest(msgspec.Struct, frozen=True):
    """The body of `PUT /v1/agent/check/update/…`."""

    status: str = ""
    output: str = ""


_requests = msgspec.json.Decoder(list[_Request])
_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def pair_of(entry: Entry) -> _Pair:
    """Return an entry in Consul's JSON form."""
    session = msgspec.UNSET if entry.session is None else entry.session
    value = entry.value or None
    return _Pair(entry.lock_index, entry.key, entry.flags, value, session, entry.create_index, entry.modify_index)


def txn_json(entries: Iterable[Entry] | None, failures: Iterable[OpFailure] = (), *, read_only: bool) -> dict[str, Any]:
    """Return the answer of a transaction, without `entries` that of a refused one; a read-only one has more members, as
    Consul's does."""
    answer = {
        "Results": None if entries is None else [{"KV": pair_of(entry)} for entry in entries],
        "Errors": [{"OpIndex": failure.op_index, "What": failure.reason} for failure in failures] or None,
    }
    more = {"Index": 0, "LastContact": 0, "KnownLeader": True, "ConsistencyLevel": ""}
    return answer | (more if read_only else {})


def decode_txn(body: bytes) -> Sequence[_Operation]:
    """Return the operations of `PUT /v1/txn`, not yet checked. Raises `Invalid`."""
    try:
        operations = [request.kv for request in from_json(_requests, body, check_depth=False)]
    except Undecodable as error:
        raise Invalid(f"Failed to parse body: {error}") from error
    for operation in operations:
        if not (0 <= operation.flags <= _MAX_UINT64 and 0 <= operation.index <= _MAX_UINT64):
            raise Invalid("Failed to parse body: Flags and Index must fit into 64 bits without a sign")
    return operations


def to_op(operation: _Operation) -> Op:
    """Return the operation; its verb must be one of `VERBS`."""
    verb = cast(Verb, operation.verb)
    return Op(verb, operation.key, operation.value or b"", operation.index, operation.session, operation.flags)


def decode_request(body: bytes, expected: type[T]) -> T:
    """Decode a JSON object, its member names in any case; an empty body is an empty object. Raises `Invalid`."""
    try:
        return converted(_fold(from_json(_anything, body)) if body.strip() else {}, expected)
    except Undecodable as error:
        raise Invalid(f"Request decode failed: {error}") from error


def session_json(record: SessionRecord) -> dict[str, Any]:
    """Return a session in Consul's JSON form."""
    bound: dict[str, list[str]] = {"NodeChecks": [], "ServiceChecks": [], "Checks": []}
    for check in record.checks:
        bound[check.kind].append(check.id)
    answer = {
        "ID": record.id,
        "Name": record.name,
        "Node": record.node,
        "LockDelay": round(record.lock_delay * 1e9),
        "Behavior": record.behavior,
        "TTL": "" if not record.ttl else f"{record.ttl:g}s" if record.ttl >= 1 else f"{record.ttl * 1000:g}ms",
        "NodeChecks": bound["NodeChecks"],
        "ServiceChecks": [{"ID": check_id, "Namespace": ""} for check_id in bound["ServiceChecks"]] or None,
        "CreateIndex": record.index,
        "ModifyIndex": record.index,
    }
    return answer | ({"Checks": bound["Checks"]} if bound["Checks"] else {})


def parse_duration(text: str) -> float:
    """Return the seconds of a duration as Go writes it ("1m30s", "15000ms"). Raises `Invalid`."""
    if len(text) > _LONGEST_DURATION or _DURATION.fullmatch(text) is None:
        shown = text if len(text) <= _LONGEST_DURATION else f"{text[:_LONGEST_DURATION]}…"
        raise Invalid(f'time: invalid duration "{shown}"')
    return sum(float(number) * _UNITS[unit] for number, unit in _PARTS.findall(text))


def blocking_of(request: web.Request) -> tuple[int, float]:
    """Return `index` and `wait` of a blocking query: it is answered once the index is above `index`, within `wait`
    seconds. Index 0 does not block."""
    wait = parse_duration(request.query["wait"]) if "wait" in request.query else DEFAULT_WAIT
    return number_of(request, "index"), min(wait, LONGEST_WAIT) or DEFAULT_WAIT


def index_headers(index: int) -> dict[str, str]:
    """Return the headers of every answer to a query."""
    return {"X-Consul-Index": str(index), **READ_HEADERS}


def json_response(answer: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return an answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(answer), status=status, headers=headers, content_type="application/json"
    )


def number_of(request: web.Request, name: str) -> int:
    """Return a parameter of up to 64 bits without a sign, 0 when it is absent. Raises `Invalid`."""
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal()):
        raise Invalid(f'{name}: parsing "{text[:40]}": invalid syntax')
    if len(text) > _DIGITS or int(text) > _MAX_UINT64:
        raise Invalid(f'{name}: parsing "{text[:40]}": value out of range')
    return int(text)


def _fold(decoded: Any) -> Any:
    """Return the value with names in lower case and without nulls; the names in `Meta`, which are the user's, stay."""
    if isinstance(decoded, dict):
        return {
            name.lower(): member if name.lower() == "meta" else _fold(member)
            for name, member in decoded.items()
            if member is not None
        }
    return [_fold(each) for each in decoded] if isinstance(decoded, list) else decoded
