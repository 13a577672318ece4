"""The RCs and intents as a farm sees them: joined from their records, each isolated from what is wrong elsewhere."""

from __future__ import annotations

import pytest

from rcfarm.farm.shard import RC, Facet, HealthGroup, Intents, Shard
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.kv.view import RefreshBudget
from store.schema.keys import Keys, health_group, shard_of
from store.schema.records import TASK_LABEL, Health, Intent, Owner, RCSpec, encode
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore

KEYS = Keys()
HOME = shard_of("web")
MANIFEST = "0" * 64


class Seen:
    """A shard, refreshed on demand, and the changes that it reported."""

    def __init__(self, store: ScriptedStore, name: str = HOME) -> None:
        self.changes: list[tuple[str, Facet]] = []
        self.health = HealthGroup(health_group(name), store, KEYS, self._verdict, RefreshBudget())
        self.shard = Shard(name, store, KEYS, self.health, self._changed, RefreshBudget())

    def _changed(self, rc: RC, facets: Facet, origin: str) -> None:
        self.changes.append((rc.id, facets))

    def _verdict(self, rc_id: str) -> None:
        self.changes.append((rc_id, Facet.HEALTH))

    async def look(self) -> RC | None:
        self.changes.clear()
        await self.health.view.refresh()
        await self.shard.view.refresh()
        return self.shard.rcs.get("web")

    async def rc(self) -> RC:
        """Look, and return the RC, which is there."""
        return require(await self.look())


def spec(rc_id: str = "web") -> bytes:
    return encode(RCSpec(id=rc_id, manifest=MANIFEST, replicas_desired=1))


async def test_the_records_of_an_rc_are_joined(store: ScriptedStore) -> None:
    """Spec, lock, placements and health are one RC; a batch of changes of a tree is reported once, as what changed."""
    session = (await store.create_session(SessionSpec("farm"))).id
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec())
    await store.txn([ops.lock(KEYS.owner("web"), encode(Owner("farm-a", "")), session)])
    await store.put(KEYS.pod("web", "n1"), b'{"pod_id":"web"}')
    await store.put(KEYS.health("web", "n1"), encode(Health("passing", MANIFEST)))
    rc = await seen.rc()
    assert rc.spec is not None
    assert (rc.session, list(rc.pods), list(rc.shard.health.of("web"))) == (session, ["n1"], ["n1"])
    assert seen.changes == [("web", Facet.HEALTH), ("web", Facet.SPEC | Facet.OWNER | Facet.PODS)]
    await store.delete(KEYS.pod("web", "n1"))
    await seen.look()
    assert seen.changes == [("web", Facet.PODS)]
    assert rc.pods == {}


async def test_a_slow_reader_sees_each_rc_once_and_as_it_is_now(store: ScriptedStore) -> None:
    """Two RCs, one locked, one locked and released in between: the newest state of each is reported."""
    beside = next(name for name in (f"rc-{n}" for n in range(1000)) if shard_of(name) == HOME)
    session = (await store.create_session(SessionSpec("farm"))).id
    seen = Seen(store)
    for rc_id in ("web", beside):
        await store.put(KEYS.spec(rc_id), spec(rc_id))
        await store.txn([ops.lock(KEYS.owner(rc_id), encode(Owner("farm-a", "")), session)])
    await store.txn([ops.unlock(KEYS.owner(beside), encode(Owner("farm-a", "")), session)])
    await seen.look()
    assert sorted(rc_id for rc_id, _ in seen.changes) == sorted(["web", beside])
    held = {rc_id: rc.session for rc_id in ("web", beside) if (rc := seen.shard.rcs.get(rc_id)) is not None}
    assert held == {"web": session, beside: None}


async def test_an_rc_without_records_is_gone(store: ScriptedStore) -> None:
    """When the folder is empty the RC is, too; created again it is a new one."""
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec())
    first = await seen.look()
    await store.txn([ops.delete_tree(KEYS.rc("web"))])
    assert await seen.look() is None
    assert seen.changes == [("web", Facet.SPEC)]
    await store.put(KEYS.spec("web"), spec())
    assert await seen.look() is not first


async def test_only_a_live_verdict_on_what_runs_counts_as_health(store: ScriptedStore) -> None:
    """A verdict without its agent's session is old; one on another manifest is about something else."""
    agent = (await store.create_session(SessionSpec("agent"))).id
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec())
    await store.txn([ops.lock(KEYS.health("web", "n1"), encode(Health("passing", MANIFEST)), agent)])
    rc = await seen.rc()
    assert rc.verdicts() == {"n1": Health("passing", MANIFEST)}
    assert rc.passing(["n1", "n2"], MANIFEST) == 1
    assert rc.passing(["n1", "n2"], "1" * 64) == 0
    assert rc.passing(["n2"], MANIFEST) == 0
    await store.destroy_session(agent)
    await seen.look()
    assert rc.verdicts() == {}
    assert rc.passing(["n1"], MANIFEST) == 0


async def test_the_verdicts_of_agents_of_both_layouts_count(store: ScriptedStore) -> None:
    """During an upgrade one agent writes beside the placements, the next one outside of `rcs/`; what the first left
    behind on a node that was upgraded is history."""
    old, new = [(await store.create_session(SessionSpec("agent"))).id for _ in range(2)]
    passing, critical = encode(Health("passing", MANIFEST)), encode(Health("critical", MANIFEST))
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec())
    await store.txn([ops.lock(KEYS.former_health("web", "n1"), passing, old)])
    await store.txn([ops.lock(KEYS.health("web", "n2"), critical, new)])
    await store.put(KEYS.former_health("web", "n2"), passing)
    rc = await seen.rc()
    assert {node: verdict.status for node, verdict in rc.verdicts().items()} == {"n1": "passing", "n2": "critical"}
    assert rc.passing(["n1", "n2"], MANIFEST) == 1
    await store.delete(KEYS.health("web", "n2"))
    await seen.look()
    assert rc.verdicts().keys() == {"n1"}


async def test_a_verdict_at_a_wrong_place_harms_no_other(store: ScriptedStore) -> None:
    """A key of another group, of no node or of no RC is bad; its neighbour counts."""
    agent = (await store.create_session(SessionSpec("agent"))).id
    passing = encode(Health("passing", MANIFEST))
    group = KEYS.health_of("web")
    other = next(name for name in (f"rc-{n}" for n in range(1000)) if KEYS.health_of(name) != group)
    wrong = [f"{group}n1/{other}", f"{group}N_1/web", f"{group}n1", f"{group}n1/web/x", f"{group}n1/We b"]
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec())
    for key in wrong:
        await store.put(key, passing)
    await store.txn([ops.lock(KEYS.health("web", "n1"), passing, agent)])
    rc = await seen.rc()
    assert rc.verdicts().keys() == {"n1"}
    assert sorted(seen.health.view.bad) == sorted(wrong)


async def test_a_bad_spec_is_reported_and_so_is_its_repair(store: ScriptedStore) -> None:
    """The last good spec stays known beside the error; after a repair or removal the RC shows the new state."""
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec())
    await seen.look()
    await store.put(KEYS.spec("web"), b'{"id":"web"}')
    rc = await seen.rc()
    assert rc.spec is not None
    assert rc.bad_spec is not None
    assert seen.changes == [("web", Facet.SPEC)]
    await store.put(KEYS.spec("web"), spec())
    repaired = await seen.look()
    assert repaired is rc
    assert repaired.bad_spec is None
    await store.put(KEYS.spec("web"), b"nonsense")
    await seen.look()
    await store.delete(KEYS.spec("web"))
    assert await seen.look() is None


async def test_a_spec_in_another_rcs_folder_is_bad(store: ScriptedStore) -> None:
    """Actions go by the RC's id: a copied spec must not let one RC act for another."""
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec("db"))
    rc = await seen.rc()
    assert rc.spec is None
    assert "'db' is another RC's" in require(rc.bad_spec).reason


@pytest.mark.parametrize("leaf", ["spec", "owner", "status", "mutation", "pods/n1", "health/n1"])
async def test_a_key_in_the_wrong_shard_is_nobodys(store: ScriptedStore, leaf: str) -> None:
    """A folder in a shard that its RC does not belong to is left out, so that it can't be taken for the real one."""
    wrong = f"{int(HOME, 16) ^ 1:02x}"
    seen = Seen(store, wrong)
    await store.put(f"{KEYS.shard(wrong)}web/{leaf}", spec())
    assert await seen.look() is None
    assert seen.changes == []
    assert len(seen.shard.view.bad) == 1
    await store.delete(f"{KEYS.shard(wrong)}web/{leaf}")
    assert await seen.look() is None
    assert seen.changes == []


@pytest.mark.parametrize(
    "leaf", ["notes", "pods", "health", "pods/n1/x", "pods/N_1", "spec/x", "spec/", "", "owner/n1"]
)
async def test_a_foreign_key_comes_and_goes_without_harm(store: ScriptedStore, leaf: str) -> None:
    """A key that the layout does not have is reported, and changes nothing, now and when it goes."""
    seen = Seen(store)
    await store.put(KEYS.spec("web"), spec())
    await seen.look()
    await store.put(KEYS.rc("web") + leaf, b"{}")
    rc = await seen.rc()
    assert rc.bad_spec is None
    assert (rc.pods, rc.former_health, rc.shard.health.of("web")) == ({}, {}, {})
    assert list(seen.shard.view.bad) == [KEYS.rc("web") + leaf]
    await store.delete(KEYS.rc("web") + leaf)
    assert await seen.look() is rc
    assert seen.changes == []


async def test_equal_labels_are_kept_once(store: ScriptedStore) -> None:
    """The pods of an RC share one copy of their labels: at 30,000 pods that is most of the memory."""
    seen = Seen(store)
    for node in ("n1", "n2", "n3"):
        await store.put(KEYS.pod("web", node), b'{"replication_controller_id":"web","tier":"front"}')
    rc = await seen.rc()
    assert len({id(record.value) for record in rc.pods.values()}) == 1


class Orders:
    """The intents, refreshed on demand, and the RCs that were notified."""

    def __init__(self, store: ScriptedStore) -> None:
        self.store = store
        self.notified: list[str] = []
        self.intents = Intents(store, KEYS, self.notified.append)

    async def look(self) -> list[str]:
        self.notified.clear()
        await self.intents.view.refresh()
        return sorted(self.notified)

    async def order(self, node: str, rc_id: str, pod_id: str = "httpd") -> None:
        await self.store.put(KEYS.intent(node, pod_id), encode(Intent(manifest=MANIFEST, rc=rc_id, shard="00")))


async def test_intents_are_found_by_pod_and_node(store: ScriptedStore) -> None:
    """A change of an intent notifies its former and its present RC, once for all changes of one answer."""
    it = Orders(store)
    await it.order("n1", "web")
    await it.order("n2", "web")
    await it.order("n2", "db", "postgres")
    assert await it.look() == ["db", "web"]
    assert sorted(it.intents.of("httpd")) == ["n1", "n2"]
    await it.order("n1", "other")
    assert await it.look() == ["other", "web"]
    await store.delete(KEYS.intent("n1", "httpd"))
    await store.delete(KEYS.intent("n2", "httpd"))
    assert await it.look() == ["other", "web"]
    assert it.intents.of("httpd") == {}


async def test_an_rc_that_waits_for_a_pod_id_is_notified_when_it_is_released(store: ScriptedStore) -> None:
    """An RC that could not use a node, because another has its pod id there, need not poll."""
    it = Orders(store)
    await it.order("n1", "web")
    await it.look()
    assert it.intents.taken("httpd", "second") == ["n1"]
    assert it.intents.taken("httpd", "web") == []
    await store.delete(KEYS.intent("n1", "httpd"))
    assert await it.look() == ["second", "web"]


async def test_a_pod_of_a_task_notifies_no_rc_but_takes_its_place(store: ScriptedStore) -> None:
    """An RC of the same pod id waits until the task has ended."""
    it = Orders(store)
    for task in ("job", "other"):
        labels = {TASK_LABEL: task}
        intent = Intent(manifest=MANIFEST, rc="", shard="00", labels=labels)
        await store.put(KEYS.intent("n1", f"{task}-0"), encode(intent))
    assert await it.look() == []
    assert it.intents.of("job-0")["n1"].value.task == "job"
    assert it.intents.taken("job-0", "web") == ["n1"]
    await store.delete(KEYS.intent("n1", "job-0"))
    assert await it.look() == ["web"]


async def test_a_bad_intent_harms_no_other(store: ScriptedStore) -> None:
    """An intent that can't be read is reported, and its neighbours are as they are."""
    it = Orders(store)
    await it.order("n1", "web")
    await store.put(KEYS.intent("n2", "httpd"), b"nonsense")
    assert await it.look() == ["web"]
    assert list(it.intents.of("httpd")) == ["n1"]
    await store.delete(KEYS.intent("n2", "httpd"))
    assert await it.look() == []
