"""What Consul's answers say: its JSON for keys and transactions, typed, and its refusals as errors. Pure.

msgspec reads and writes the base64 of values itself, so that a listing of 3,000 entries is decoded in about 2 ms
(json and base64 of the standard library: 6 ms). Consul writes an empty value as null; an `Entry` has b"" there.

Consul answers many permanent errors with status 500, so some are recognised by their text (as of 1.8.7). Any other
answer counts as `Unavailable`, which is safe: the caller reads again before it acts again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from store.consul.settings import ConsulSettings
from store.kv import ops
from store.kv.protocol import Denied, Entry, Invalid, Op, OpFailure, StoreError, TooLarge, Unavailable, Verb

PART_BYTES = 500_000  # decoded in one step, in about a millisecond
PART_ENTRIES = 1000
MAYBE_APPLIED = "it may have been applied"
NOT_APPLIED = "it was not applied"
NOTHING_CHANGED = "nothing was changed"  # an embedded store's own words
_DENIED = ("Permission denied", "ACL not found", "rpc error making call: Permission denied")
_NOT_READY = ("Missing check '", "is in critical state")
_PERMANENT = ("Invalid Session TTL", "UUID must be")
_NO_LEADER = "No cluster leader"
_READS = frozenset({"get", "get-tree", "check-index", "check-session"})  # for check-not-exists Consul requires write


class CheckNotReady(Unavailable):
    """The session's check has not reached the catalog, or is not passing there yet."""


class _Pair(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    key: str
    value: bytes | None
    create_index: int
    modify_index: int
    lock_index: int = 0
    flags: int = 0
    session: str | None = None


class _Operation(msgspec.Struct, frozen=True, rename="pascal", omit_defaults=True, gc=False):
    verb: Verb
    key: str
    value: bytes = b""
    index: int = 0
    session: str = ""
    flags: int = 0


class _Request(msgspec.Struct, frozen=True):
    kv: _Operation = msgspec.field(name="KV")


class _Result(msgspec.Struct, frozen=True):
    kv: _Pair = msgspec.field(name="KV")


class _Error(msgspec.Struct, frozen=True, rename="pascal"):
    op_index: int
    what: str


class _Response(msgspec.Struct, frozen=True, rename="pascal"):
    results: list[_Result] | None = None
    errors: list[_Error] | None = None


_encoder = msgspec.json.Encoder()
_pairs = msgspec.json.Decoder(list[_Pair])
_pair = msgspec.json.Decoder(_Pair)
_unread = msgspec.json.Decoder(list[msgspec.Raw])
_keys = msgspec.json.Decoder(list[str] | None)
_response = msgspec.json.Decoder(_Response)


def encode_txn(ops: Iterable[Op]) -> bytes:
    """Return the body of `PUT /v1/txn`."""
    return _encoder.encode(
        [_Request(_Operation(op.verb, op.key, op.value, op.index, op.session, op.flags)) for op in ops]
    )


def decode_txn(body: bytes) -> list[Entry]:
    """Return the entries that a committed transaction answers."""
    return [_entry(result.kv) for result in _response.decode(body).results or ()]


def decode_refusal(body: bytes) -> Sequence[OpFailure]:
    """Return the reasons why a transaction was refused."""
    return [OpFailure(error.op_index, error.what) for error in _response.decode(body).errors or ()]


def decode_entries(body: bytes) -> list[Entry]:
    """Return the entries of `GET /v1/kv/…`."""
    return [_entry(pair) for pair in _pairs.decode(body)]


def decode_in_parts(body: bytes) -> Iterator[list[Entry]]:
    """Yield the entries of `decode_entries` in parts: decoding ten megabytes at once would block the loop."""
    if len(body) <= PART_BYTES:
        yield decode_entries(body)
        return
    pairs = _unread.decode(body)
    for start in range(0, len(pairs), PART_ENTRIES):
        yield [_entry(_pair.decode(pair)) for pair in pairs[start : start + PART_ENTRIES]]


def decode_keys(body: bytes) -> list[str]:
    """Return the keys of `GET /v1/kv/…?keys`."""
    return _keys.decode(body) or []


def seconds(duration: str) -> float:
    """Return a Go duration, such as `1m30s` or `250ms`, in seconds."""
    sizes = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
    return sum(float(number) * sizes[unit] for number, unit in re.findall(r"([0-9.]+)([a-zµ]+)", duration))


def _entry(pair: _Pair) -> Entry:
    return Entry(
        pair.key,
        pair.value or b"",
        pair.create_index,
        pair.modify_index,
        pair.lock_index,
        pair.flags,
        pair.session,
    )


def describe(method: str, path: str) -> str:
    """Return the call's name for messages, without the API's version. `path` is not encoded."""
    return f"{method} {path.removeprefix('/v1/')}"


def unavailable(settings: ConsulSettings, call: str, cause: str, *, applied: str = "") -> Unavailable:
    """Return the error for a missing or unusable answer. `applied`: the known fate of a write; "" for a read."""
    fate = f"; {applied}" if applied else ""
    return Unavailable(f"Consul at {settings.place} is unavailable: {cause} ({call}{fate})")


def denied(settings: ConsulSettings, call: str, text: str, permission: str = "") -> Denied:
    """Return the error for a missing permission. It names the token's source, never the token."""
    if not settings.token_source:
        advice = (
            "no token is set; set CONSUL_HTTP_TOKEN or CONSUL_HTTP_TOKEN_FILE (that of an embedded store is the file "
            "endpoint.token in its directory)"
        )
    elif "ACL not found" in text:
        advice = f"Consul does not know the token from {settings.token_source}"
    else:
        advice = f"check the policies of the token from {settings.token_source}"
    needed = f" (needs {permission})" if permission and "Missing " not in text else ""
    return Denied(f"Consul at {settings.place} denied {call}: {text}{needed}; {advice}")


def error_of(settings: ConsulSettings, method: str, path: str, status: int, text: str) -> StoreError:
    """Return the error for an HTTP answer that is neither a success nor an expected 404 or 409."""
    call, text = describe(method, path), text.strip()
    if status in (401, 403):
        area, _, name = path.removeprefix("/v1/").partition("/")
        access = "read" if method == "GET" else "write"
        permission = {"kv": f"key:{access} on {name}", "session": f"session:{access}"}.get(area, "")
        return denied(settings, call, text, permission)
    if status == 413:
        return TooLarge(f"Consul at {settings.place} did not take {call}: {text}")
    if 300 <= status < 400:
        return Invalid(f"{call}: Consul's HTTP API can't address a key with an empty segment, '.' or '..' in it")
    if status < 500 and status != 429:
        return Invalid(f"Consul at {settings.place} did not understand {call}: status {status}, {text or 'no reason'}")
    if any(known in text for known in _PERMANENT):
        return Invalid(f"Consul at {settings.place} refused {call}: {text}")
    cause = f"status {status}, {text or 'no reason'}"
    if any(known in text for known in _NOT_READY):
        return CheckNotReady(f"Consul at {settings.place}: {text} ({call})")
    if method == "GET" or NOTHING_CHANGED in text:
        return unavailable(settings, call, cause)
    is_refused = status == 429 or _NO_LEADER in text
    return unavailable(settings, call, cause, applied=NOT_APPLIED if is_refused else MAYBE_APPLIED)


def txn_error(settings: ConsulSettings, operations: Sequence[Op], failures: Sequence[OpFailure]) -> StoreError:
    """Return the error for a refused transaction."""
    for failure in failures:
        if failure.reason.startswith(_DENIED):
            op = operations[failure.op_index]
            access = "read" if op.verb in _READS else "write"
            call = f"operation {failure.op_index} of a transaction ({op.verb} {op.key})"
            return denied(settings, call, failure.reason, f"key:{access} on {op.key}")
        if failure.reason.startswith("unknown KV verb"):
            return Invalid(f"operation {failure.op_index}: {failure.reason}")
    return ops.refusal(operations, failures)
