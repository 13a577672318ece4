"""The key layout, taken apart again."""

from __future__ import annotations

import pytest

from store.keys import BadKey, HealthKey, Keys, RCKey, shard_of

keys = Keys()
SHARD = shard_of("web")


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (keys.spec("web"), RCKey(SHARD, "web", "spec")),
        (keys.owner("web"), RCKey(SHARD, "web", "owner")),
        (keys.mutation("web"), RCKey(SHARD, "web", "mutation")),
        (keys.status("web"), RCKey(SHARD, "web", "status")),
        (keys.pod("web", "host-1.example.org"), RCKey(SHARD, "web", "pods", "host-1.example.org")),
        (keys.former_health("web", "n1"), RCKey(SHARD, "web", "health", "n1")),
    ],
)
def test_classifies_every_key_of_an_rc(key: str, parts: RCKey) -> None:
    """Scenario 26: ownership lock, mutation lock and records are told apart, with their RC and node."""
    assert keys.classify(key) == parts


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
    """Scenario 26: nothing is guessed; the error names the key."""
    with pytest.raises(BadKey, match=key):
        keys.classify(key)


def test_health_is_kept_by_group_node_and_rc() -> None:
    """An agent writes under the prefixes of its node alone; every shard's health is in one of them."""
    nodes = keys.node_healths("host-1")
    for rc_id in (f"rc-{number}" for number in range(200)):
        key = keys.health(rc_id, "host-1")
        assert keys.classify_health(key) == HealthKey("host-1", rc_id)
        assert key.startswith(keys.health_of(rc_id))
        assert sum(key.startswith(prefix) for prefix in nodes) == 1


@pytest.mark.parametrize("key", ["rcfarm/health/", "rcfarm/health/0", "rcfarm/health/0/n1", "rcfarm/health/0/n1/"])
def test_a_malformed_key_of_health_is_an_error(key: str) -> None:
    """Nothing is guessed; the error names the key."""
    with pytest.raises(BadKey, match=key):
        keys.classify_health(key)


def test_only_specs_are_specs() -> None:
    """A placement on a node that happens to be called `spec` is no spec."""
    keys = Keys(root="some/where")
    assert keys.is_spec(keys.spec("web"))
    assert not keys.is_spec(keys.status("web"))
    assert not keys.is_spec(keys.pod("web", "spec"))
    assert not keys.is_spec(keys.rcs + "spec")
    assert not keys.is_spec(keys.intent("web", "spec"))
