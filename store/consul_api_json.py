"""What goes over the wire between Consul's clients and the façade, typed.

Go reads JSON member names whatever their case, and clients rely on it, so requests other than transactions are read
with their names folded to lower case. Values are base64; an empty one is null.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from store.embedded_state import SessionRecord
from store.kv import Entry, Invalid, Op, OpFailure, Verb

VERBS = frozenset(get_args(Verb))
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|ms|s|m|h)")
_encoder = msgspec.json.Encoder()


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


_requests = msgspec.json.Decoder(list[_Request])


def encode(answer: object) -> bytes:
    """JSON of anything made of plain data."""
    return _encoder.encode(answer)


def encode_entries(entries: Iterable[Entry]) -> bytes:
    """The body of `GET /v1/kv/…`."""
    return _encoder.encode([_pair(entry) for entry in entries])


def encode_result(entries: Iterable[Entry], *, read_only: bool) -> bytes:
    """The body of a committed transaction; one that only read tells more about the answer, as Consul's does."""
    return _transaction([{"KV": _pair(entry)} for entry in entries], None, read_only=read_only)


def encode_refusal(failures: Iterable[OpFailure], *, read_only: bool) -> bytes:
    """The body of a refused transaction (status 409)."""
    errors = [{"OpIndex": failure.op_index, "What": failure.reason} for failure in failures]
    return _transaction(None, errors, read_only=read_only)


def decode_txn(body: bytes) -> Sequence[_Operation]:
    """The operations of `PUT /v1/txn`, not yet checked. Raises `Invalid`."""
    try:
        return [request.kv for request in _requests.decode(body)]
    except msgspec.MsgspecError as error:
        raise Invalid(f"Failed to parse body: {error}") from error


def to_op(operation: _Operation) -> Op:
    """The operation; its verb must be one of `VERBS`."""
    return msgspec.convert(
        {name: getattr(operation, name) for name in ("verb", "key", "index", "session", "flags")}
        | {"value": operation.value or b""},
        Op,
        builtin_types=(bytes,),
    )


def decode_folded(body: bytes) -> dict[str, Any]:
    """A JSON object with all of its member names in lower case; an empty body is an empty object. Raises `Invalid`."""
    if not body.strip():
        return {}
    try:
        decoded = _fold(msgspec.json.decode(body))
    except msgspec.DecodeError as error:
        raise Invalid(f"Request decode failed: {error}") from error
    if not isinstance(decoded, dict):
        raise Invalid("Request decode failed: expected an object")
    return decoded


def session_json(record: SessionRecord) -> dict[str, Any]:
    """A session as Consul tells of it."""
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
    """Seconds of a duration as Go writes it ("1m30s", "15000ms"). Raises `Invalid`."""
    parts = _DURATION.findall(text)
    if text != "0" and (not parts or "".join(parts) != text):
        raise Invalid(f'time: invalid duration "{text}"')
    return sum(float(part.rstrip("nuµmsh")) * _UNITS[part.lstrip("0123456789.")] for part in parts)


def format_duration(seconds: float) -> str:
    """A duration that Go reads."""
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
    if isinstance(decoded, dict):
        return {name.lower(): _fold(member) for name, member in decoded.items()}
    return [_fold(each) for each in decoded] if isinstance(decoded, list) else decoded
