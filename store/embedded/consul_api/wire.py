"""The messages between Consul's clients and the façade, typed.

Go reads JSON member names whatever their case, takes null for absent, and clients rely on both, so requests other than
transactions are read with their names folded to lower case and without nulls. Values are base64; an empty one is null.
Whatever a body holds, the only error that it causes is `Invalid`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar, get_args

import msgspec

from store.decoding import Undecodable, converted, from_json
from store.embedded.state import SessionRecord
from store.kv.protocol import Entry, Invalid, Op, OpFailure, Verb

VERBS = frozenset(get_args(Verb))
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)"
_PARTS, _DURATION = re.compile(_PART), re.compile(rf"(?:{_PART})+|0")
_LONGEST_DURATION = 64  # characters
MAX_UINT64 = (1 << 64) - 1
_encoder = msgspec.json.Encoder()

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


def encode(answer: object) -> bytes:
    """JSON of anything made of plain data."""
    return _encoder.encode(answer)


def encode_entries(entries: Iterable[Entry]) -> bytes:
    """Return the body of `GET /v1/kv/…`."""
    return _encoder.encode([_pair(entry) for entry in entries])


def encode_result(entries: Iterable[Entry], *, read_only: bool) -> bytes:
    """Return the body of a committed transaction; a read-only one has more members, as Consul's does."""
    return _transaction([{"KV": _pair(entry)} for entry in entries], None, read_only=read_only)


def encode_refusal(failures: Iterable[OpFailure], *, read_only: bool) -> bytes:
    """Return the body of a refused transaction (status 409)."""
    errors = [{"OpIndex": failure.op_index, "What": failure.reason} for failure in failures]
    return _transaction(None, errors, read_only=read_only)


def decode_txn(body: bytes) -> Sequence[_Operation]:
    """Return the operations of `PUT /v1/txn`, not yet checked. Raises `Invalid`."""
    try:
        operations = [request.kv for request in from_json(_requests, body, check_depth=False)]
    except Undecodable as error:
        raise Invalid(f"Failed to parse body: {error}") from error
    for operation in operations:
        if not (0 <= operation.flags <= MAX_UINT64 and 0 <= operation.index <= MAX_UINT64):
            raise Invalid("Failed to parse body: Flags and Index must fit into 64 bits without a sign")
    return operations


def to_op(operation: _Operation) -> Op:
    """Return the operation; its verb must be one of `VERBS`."""
    return msgspec.convert(
        {name: getattr(operation, name) for name in ("verb", "key", "index", "session", "flags")}
        | {"value": operation.value or b""},
        Op,
        builtin_types=(bytes,),
    )


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
        "TTL": format_duration(record.ttl) if record.ttl else "",
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


def format_duration(seconds: float) -> str:
    """Return a duration in the form that Go reads."""
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"


def _pair(entry: Entry) -> _Pair:
    session = msgspec.UNSET if entry.session is None else entry.session
    value = entry.value or None
    return _Pair(entry.lock_index, entry.key, entry.flags, value, session, entry.create_index, entry.modify_index)


def _transaction(results: Any, errors: Any, *, read_only: bool) -> bytes:
    answer = {"Results": results, "Errors": errors}
    if read_only:
        answer |= {"Index": 0, "LastContact": 0, "KnownLeader": True, "ConsistencyLevel": ""}
    return _encoder.encode(answer)


def _fold(decoded: Any) -> Any:
    """Return the value with names in lower case and without nulls; the names in `Meta`, which are the user's, stay."""
    if isinstance(decoded, dict):
        return {
            name.lower(): member if name.lower() == "meta" else _fold(member)
            for name, member in decoded.items()
            if member is not None
        }
    return [_fold(each) for each in decoded] if isinstance(decoded, list) else decoded
