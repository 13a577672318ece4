"""What Consul's refusals mean, in the terms of `store.kv`. Pure: status and text in, an error out.

Consul answers many permanent mistakes with status 500, so some are told apart by their text (as of 1.8.7). What is not
recognised counts as `Unavailable`, which is safe: the caller reads again before it acts again.
"""

from __future__ import annotations

from collections.abc import Sequence

from store import ops
from store.consul_settings import ConsulSettings
from store.kv import Denied, Invalid, Op, OpFailure, StoreError, TooLarge, Unavailable

MAYBE_APPLIED = "it may have been applied"
NOT_APPLIED = "it was not applied"
NOTHING_CHANGED = "nothing was changed"  # an embedded store's own words
_DENIED = ("Permission denied", "ACL not found", "rpc error making call: Permission denied")
_NOT_READY = ("Missing check '", "is in critical state")
_PERMANENT = ("Invalid Session TTL", "UUID must be")
_NO_LEADER = "No cluster leader"
_READS = frozenset({"get", "get-tree", "check-index", "check-session"})  # for check-not-exists Consul asks for write


class CheckNotReady(Unavailable):
    """The session's check has not reached the catalog, or is not passing there yet."""


def describe(method: str, path: str) -> str:
    """The call as messages name it: without the API's version. `path` is not encoded."""
    return f"{method} {path.removeprefix('/v1/')}"


def unavailable(settings: ConsulSettings, call: str, cause: str, *, applied: str = "") -> Unavailable:
    """No usable answer. `applied`: what is known of a write's fate; "" for a read."""
    fate = f"; {applied}" if applied else ""
    return Unavailable(f"Consul at {settings.place} is unavailable: {cause} ({call}{fate})")


def denied(settings: ConsulSettings, call: str, text: str, permission: str = "") -> Denied:
    """A lack of permission. Says where the token came from, never what it is."""
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
    """The error for an HTTP answer that is neither a success nor an expected 404 or 409."""
    call, text = describe(method, path), text.strip()
    if status in (401, 403):
        return denied(settings, call, text, _permission(method, path))
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
    return unavailable(settings, call, cause, applied=_fate(method, status, text))


def txn_error(settings: ConsulSettings, operations: Sequence[Op], failures: Sequence[OpFailure]) -> StoreError:
    """The error for a refused transaction."""
    for failure in failures:
        if failure.reason.startswith(_DENIED):
            op = operations[failure.op_index]
            access = "read" if op.verb in _READS else "write"
            call = f"operation {failure.op_index} of a transaction ({op.verb} {op.key})"
            return denied(settings, call, failure.reason, f"key:{access} on {op.key}")
        if failure.reason.startswith("unknown KV verb"):
            return Invalid(f"operation {failure.op_index}: {failure.reason}")
    return ops.refusal(operations, failures)


def _fate(method: str, status: int, text: str) -> str:
    if method == "GET" or NOTHING_CHANGED in text:
        return ""
    return NOT_APPLIED if status == 429 or _NO_LEADER in text else MAYBE_APPLIED


def _permission(method: str, path: str) -> str:
    area, _, name = path.removeprefix("/v1/").partition("/")
    access = "read" if method == "GET" else "write"
    return {"kv": f"key:{access} on {name}", "session": f"session:{access}"}.get(area, "")
