"""The errors that Consul's refusals become, with the texts of Consul 1.8.7, and Go's durations."""

from __future__ import annotations

import pytest

from store.consul.client import CheckNotReady, ConsulSettings, error_of, seconds
from store.consul.store import txn_error
from store.kv import ops
from store.kv.protocol import (
    Denied,
    Invalid,
    Op,
    OpFailure,
    OwnershipLost,
    SessionExpired,
    StoreError,
    TooLarge,
    Unavailable,
)

SETTINGS = ConsulSettings(token="secret", token_source="CONSUL_HTTP_TOKEN")


@pytest.mark.parametrize(
    ("method", "path", "status", "text", "error", "message"),
    [
        ("GET", "/v1/kv/a b", 403, "Permission denied", Denied, "denied GET kv/a b: .*needs key:read on a b"),
        ("PUT", "/v1/kv/a", 403, "Permission denied", Denied, "check the policies of the token from CONSUL_HTTP_TOKEN"),
        ("PUT", "/v1/session/create", 403, "Permission denied", Denied, "needs session:write"),
        (
            "PUT",
            "/v1/agent/service/register",
            403,
            "Permission denied: Missing service:write on x",
            Denied,
            "write on x",
        ),
        ("GET", "/v1/kv/a", 403, "ACL not found", Denied, "does not know the token from CONSUL_HTTP_TOKEN"),
        ("PUT", "/v1/kv/a", 413, "Request body too large", TooLarge, "too large"),
        ("PUT", "/v1/kv/a", 400, "Missing key name", Invalid, "Missing key name"),
        ("PUT", "/v1/kv/a//b", 301, "", Invalid, "kv/a//b: .*can't address"),
        ("PUT", "/v1/session/create", 500, "Invalid Session TTL '1000000000', must be", Invalid, "Invalid Session TTL"),
        ("PUT", "/v1/session/create", 500, "Missing check 'x' registration", CheckNotReady, "Missing check"),
        ("PUT", "/v1/session/create", 500, "Check 'x' is in critical state", CheckNotReady, "critical"),
        ("PUT", "/v1/txn", 500, "No cluster leader", Unavailable, "No cluster leader .*it was not applied"),
        ("PUT", "/v1/txn", 500, "rpc error making call: EOF", Unavailable, "it may have been applied"),
        (
            "PUT",
            "/v1/txn",
            429,
            "Your IP is issuing too many connections",
            Unavailable,
            "it was not applied",
        ),
        ("GET", "/v1/kv/a", 500, "rpc error", Unavailable, r"\(GET kv/a\)"),
        ("PUT", "/v1/txn", 500, "store.db: disk is full; nothing was changed", Unavailable, r"changed \(PUT txn\)$"),
        ("GET", "/v1/kv/a", 503, "", Unavailable, "status 503, no reason"),
    ],
)
def test_http_refusals(method: str, path: str, status: int, text: str, error: type[StoreError], message: str) -> None:
    """Each status and text has its error, with the call, the cause and what to do; never the token."""
    found = error_of(SETTINGS, method, path, status, text)
    assert type(found) is error
    with pytest.raises(error, match=message):
        raise found
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("operation", "access"),
    [
        (ops.put("rcfarm/x", b""), "write"),
        (ops.delete("rcfarm/x"), "write"),
        (ops.check_not_exists("rcfarm/x"), "write"),
        (ops.check_index("rcfarm/x", 1), "read"),
        (ops.check_session("rcfarm/x", "s"), "read"),
        (ops.get_tree("rcfarm/x"), "read"),
    ],
)
def test_a_denied_operation_names_its_key(operation: Op, access: str) -> None:
    """Consul only says the number of the operation; the message adds its key and what it needs."""
    error = txn_error(SETTINGS, [ops.get("a"), operation], [OpFailure(1, "Permission denied")])
    assert isinstance(error, Denied)
    assert f"operation 1 of a transaction ({operation.verb} rcfarm/x)" in str(error)
    assert f"key:{access} on rcfarm/x" in str(error)


def test_a_lost_fence_is_ownership_lost() -> None:
    """A failed check-session counts above whatever else did not hold."""
    operations = [ops.lock("a", b"", "s"), ops.check_session("o", "s")]
    failures = [OpFailure(0, 'invalid session "s"'), OpFailure(1, 'failed to check session, key "o" doesn\'t exist')]
    error = txn_error(SETTINGS, operations, failures)
    assert isinstance(error, OwnershipLost)
    assert error.failures == tuple(failures)


def test_a_dead_session_is_session_expired() -> None:
    """A lock under a session that is gone says so."""
    error = txn_error(SETTINGS, [ops.lock("a", b"", "s")], [OpFailure(0, 'invalid session "s"')])
    assert isinstance(error, SessionExpired)


@pytest.mark.parametrize(
    ("text", "value"), [("0s", 0), ("10s", 10), ("1m30s", 90), ("1h0m0s", 3600), ("250ms", 0.25), ("1.5s", 1.5)]
)
def test_go_durations_are_seconds(text: str, value: float) -> None:
    """As Go prints them, in whatever units."""
    assert seconds(text) == pytest.approx(value)
