"""The key layout, taken apart again."""

from __future__ import annotations

import pytest

from store.schema.keys import (
    AuditKey,
    BadKey,
    HealthKey,
    Keys,
    NodeKey,
    PodKey,
    QuotaKey,
    RCKey,
    RCParts,
    TaskKey,
    shard_of,
)

keys = Keys()
SHARD = shard_of("web")


@pytest.mark.parametrize(
    "key",
    [
        "rcfarm/nodes/n1/spec",
        "rcfarm/rcs/",
        "rcfarm/rcs/00",
        f"rcfarm/rcs/{SHARD}/web",
        f"rcfarm/rcs/{SHARD}/web/",
        f"rcfarm/rcs/{SHARD}/web/owners",
        f"rcfarm/rcs/{SHARD}/web/owner/",
        f"rcfarm/rcs/{SHARD}/web/owner/n1",
        f"rcfarm/rcs/{SHARD}/web/pods",
        f"rcfarm/rcs/{SHARD}/web/pods/",
        f"rcfarm/rcs/{SHARD}/web/pods/n1/x",
        f"rcfarm/rcs/{SHARD}/web/pods/N_1",
        f"rcfarm/rcs/{SHARD}/We b/spec",
        f"rcfarm/rcs/{'00' if SHARD != '00' else '01'}/web/spec",
    ],
)
def test_a_malformed_key_is_an_error(key: str) -> None:
    """Nothing is guessed; the error names the key."""
    with pytest.raises(BadKey, match=key):
        keys.parse_rc(key)


def test_health_is_kept_by_group_node_and_rc() -> None:
    """An agent writes under the prefixes of its node alone; every shard's health is in one of them."""
    nodes = keys.node_healths("host-1")
    for rc_id in (f"rc-{number}" for number in range(200)):
        key = keys.health(rc_id, "host-1")
        assert keys.parse_health(key) == HealthKey("host-1", rc_id)
        assert key.startswith(keys.health_of(rc_id))
        assert sum(key.startswith(prefix) for prefix in nodes) == 1


@pytest.mark.parametrize("key", ["rcfarm/health/", "rcfarm/health/0", "rcfarm/health/0/n1", "rcfarm/health/0/n1/"])
def test_a_malformed_key_of_health_is_an_error(key: str) -> None:
    """Nothing is guessed; the error names the key."""
    with pytest.raises(BadKey, match=key):
        keys.parse_health(key)


def test_only_specs_are_specs() -> None:
    """A placement on a node that happens to be called `spec` is no spec."""
    keys = Keys(root="some/where")
    assert keys.is_spec(keys.spec("web"))
    assert not keys.is_spec(keys.status("web"))
    assert not keys.is_spec(keys.pod("web", "spec"))
    assert not keys.is_spec(keys.rcs + "spec")
    assert not keys.is_spec(keys.intent("web", "spec"))


@pytest.mark.parametrize("root", ["rcfarm", "teams/web"])
def test_what_is_built_is_taken_apart(root: str) -> None:
    """Each kind of key gives back the names that it was built from, under a root of any depth."""
    keys = Keys(root)
    for key in (keys.spec("web"), keys.owner("web"), keys.mutation("web"), keys.status("web")):
        assert keys.parse_rc(key) == RCKey(SHARD, "web", key.rpartition("/")[2])  # type: ignore[arg-type]
    for key, kind in (
        (keys.pod("web", "host-1.example"), "pods"),
        (keys.former_health("web", "host-1.example"), "health"),
    ):
        assert keys.parse_rc(key) == RCKey(SHARD, "web", kind, "host-1.example")  # type: ignore[arg-type]
    assert keys.split_rc(keys.status("web")) == RCParts("web", "status", "")
    assert keys.split_rc(keys.pod("web", "host-1")) == RCParts("web", "pods", "host-1")
    assert keys.parse_health(keys.health("web", "host-1")) == HealthKey("host-1", "web")
    assert keys.parse_pod(keys.intent("host-1", "hello")) == PodKey("host-1", "hello")
    assert keys.parse_pod(keys.reality("host-1", "hello")) == PodKey("host-1", "hello")
    assert keys.parse_node(keys.node_alive("host-1")) == NodeKey("host-1", "alive")
    assert keys.name_of(keys.manifest("0af1")) == "0af1"
    assert keys.name_of(keys.farm("farm-a")) == "farm-a"
    assert keys.name_of(keys.reservations("host-1")) == "host-1"
    assert keys.parse_audit(keys.audit_event("2026-01-31", "01ARZ")) == AuditKey("2026-01-31", "01ARZ")
    assert keys.parse_audit(f"{keys.audit}2026-01-31/") == AuditKey("2026-01-31", "")


@pytest.mark.parametrize("rest", ["", "/", "x", "x/", "x/y/z"])
def test_a_key_of_no_known_shape_is_taken_apart_without_an_error(rest: str) -> None:
    """What checks nothing raises nothing: a missing part is empty."""
    keys = Keys()
    assert keys.split_rc(keys.rcs + rest) == RCParts(*(*rest.split("/", 3)[1:], "", "", "")[:3])
    assert keys.parse_pod(keys.intents + rest) == PodKey(*(*rest.split("/", 1), "")[:2])
    assert keys.parse_node(keys.nodes + rest) == NodeKey(*(*rest.split("/", 1), "")[:2])
    assert keys.split_health(keys.healths + rest).rc == "".join(rest.split("/", 2)[2:])


@pytest.mark.parametrize("token", ["train-7", "train-7/0:a b", "ü%2F", "."])
def test_a_token_of_any_text_is_one_part_of_a_key(token: str) -> None:
    """Tokens of a plugin are arbitrary text; none of them can be mistaken for another key."""
    for key, kind in ((keys.quota_grant("gpu", token), "grants"), (keys.quota_ticket("gpu", token), "tickets")):
        assert keys.parse_quota(key) == QuotaKey("gpu", kind, token)  # type: ignore[arg-type]
        assert key.count("/") == 4
    assert keys.parse_quota(keys.quota_limit("main:http:pool")) == QuotaKey("main:http:pool", "limit")
    assert keys.parse_quota(keys.quota_head("gpu")) == QuotaKey("gpu", "head")


@pytest.mark.parametrize("rest", ["gpu", "gpu/other", "gpu/limit/x", "gpu/grants/", "a b/limit", "gpu/grants/a/b"])
def test_a_key_that_no_quota_has_is_refused(rest: str) -> None:
    with pytest.raises(BadKey):
        keys.parse_quota(keys.quotas + rest)


@pytest.mark.parametrize("root", ["rcfarm", "teams/web"])
def test_keys_of_tasks_are_taken_apart(root: str) -> None:
    """Each kind of key gives back the shard, the id and the rest that it was built from."""
    keys = Keys(root)
    for key in (keys.task_spec("web"), keys.task_owner("web"), keys.task_state("web")):
        assert key.startswith(keys.task_shard(SHARD))
        assert keys.parse_task(key) == TaskKey(SHARD, "web", key.rpartition("/")[2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key",
    [
        "rcfarm/tasks/",
        f"rcfarm/tasks/{SHARD}/web",
        f"rcfarm/tasks/{SHARD}/web/status",
        f"rcfarm/tasks/{SHARD}/web/spec/x",
        f"rcfarm/tasks/{SHARD}/W/spec",
        f"rcfarm/tasks/{'00' if SHARD != '00' else '01'}/web/spec",
        "rcfarm/rcs/00/web/spec",
    ],
)
def test_a_malformed_key_of_a_task_is_an_error(key: str) -> None:
    """Nothing is guessed; the error names the key."""
    with pytest.raises(BadKey, match=key):
        keys.parse_task(key)


def test_keys_of_schedules() -> None:
    keys = Keys("rcfarm")
    assert keys.parse_schedule(keys.schedule_spec("nightly")) == ("nightly", "spec")
    assert keys.parse_schedule(keys.schedule_state("nightly")) == ("nightly", "state")
    for bad in ("nightly", "nightly/owner", "Nightly/spec", "nightly/spec/x", "/spec"):
        with pytest.raises(BadKey, match="no key of a schedule"):
            keys.parse_schedule(keys.schedules + bad)
