"""Claims: many locks in one transaction, without those that another farm holds."""

from __future__ import annotations

import pytest

from controllers.ownership.claims import Claims
from rcfarm.farm.owned_rcs import rcs_of
from rcfarm.farm.shard import RC, HealthGroup, Shard
from store.kv import ops
from store.kv.protocol import OwnershipLost, SessionSpec
from store.kv.view import RefreshBudget
from store.schema.keys import Keys
from store.schema.records import Owner, RCSpec, decode, encode
from store.schema.selectors import Selector
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore

KEYS = Keys(shards=1)
MEMBER = KEYS.farm("farm-a")
MANIFEST = "0" * 64


async def member(store: ScriptedStore, key: str = MEMBER) -> str:
    """Return the session of a live member."""
    session = (await store.create_session(SessionSpec("farm"))).id
    await store.inner.txn([ops.lock(key, b"{}", session)])
    return session


async def shard_of(store: ScriptedStore, count: int) -> Shard:
    """Return a shard with `count` free RCs, as its view shows it."""
    for number in range(count):
        rc_id = f"rc-{number:03}"
        await store.put(KEYS.spec(rc_id), encode(RCSpec(id=rc_id, manifest=MANIFEST, replicas_desired=1)))
    health = HealthGroup("0", store, KEYS, lambda rc_id: None, RefreshBudget())
    shard = Shard("00", store, KEYS, health, lambda rc, facets, origin: None, RefreshBudget())
    await shard.view.refresh()
    store.transactions.clear()
    return shard


def claims(store: ScriptedStore, selector: str = "") -> Claims[RC]:
    return Claims(store, rcs_of(KEYS, "farm-a"), Selector.parse(selector))


async def test_31_new_rcs_are_claimed_with_one_transaction(store: ScriptedStore) -> None:
    """A hundred of them need four transactions; each one checks the membership; the view shows the locks at once."""
    session, shard = await member(store), await shard_of(store, 100)
    claiming = claims(store)
    assert await claiming.claim(shard, list(shard), MEMBER, session) == 0
    assert [len(sent) for sent in store.transactions] == [63, 63, 63, 15]
    assert all(sent[0] == ops.check_session(MEMBER, session) for sent in store.transactions)
    assert {rc.session for rc in shard} == {session}
    assert (claiming.claimed, claiming.conflicts) == (100, 0)


async def test_what_another_has_is_passed_over(store: ScriptedStore) -> None:
    """An RC that another farm locked meanwhile is denied, and costs the others one more round trip."""
    session, shard = await member(store), await shard_of(store, 10)
    other = await member(store, KEYS.farm("farm-b"))
    await store.inner.txn([ops.lock(KEYS.owner("rc-003"), encode(Owner("farm-b", "")), other)])
    claiming = claims(store)
    assert await claiming.claim(shard, list(shard), MEMBER, session) == 1
    assert len(store.transactions) == 2
    entry = require(await store.get(KEYS.owner("rc-003")))
    assert entry.session == other
    assert sum(rc.session == session for rc in shard) == 9
    assert (claiming.claimed, claiming.conflicts) == (9, 1)


async def test_63_that_had_an_owner_are_claimed_with_one_transaction(store: ScriptedStore) -> None:
    """Their fencing tokens show whether they still exist."""
    session, shard = await member(store), await shard_of(store, 100)
    claiming = claims(store)
    await claiming.claim(shard, list(shard), MEMBER, session)
    await claiming.release(shard, list(shard), session)
    store.transactions.clear()
    assert await claiming.claim(shard, list(shard), MEMBER, session) == 0
    assert [len(sent) for sent in store.transactions] == [64, 38]


async def test_an_rc_that_had_an_owner_and_was_deleted_is_a_husk(store: ScriptedStore) -> None:
    """The view is late: it shows an RC as free that is gone by now. Its lock is a new key, so the shard is read before
    the RC is shown as owned: it has no spec, and nothing is added for it."""
    session, shard = await member(store), await shard_of(store, 3)
    claiming = claims(store)
    await claiming.claim(shard, list(shard), MEMBER, session)
    await claiming.release(shard, list(shard), session)
    await store.inner.txn([ops.delete_tree(KEYS.rc("rc-001"))])
    await claiming.claim(shard, list(shard), MEMBER, session)
    gone = require(shard.rcs.get("rc-001"))
    assert gone.is_husk
    assert [rc.id for rc in shard if rc.session == session and rc.spec] == ["rc-000", "rc-002"]


async def test_an_rc_that_was_deleted_is_not_claimed(store: ScriptedStore) -> None:
    """The view is late: it shows RCs that are gone by now. No lock is created for them, and the others are claimed."""
    session, shard = await member(store), await shard_of(store, 40)
    for rc_id in ("rc-003", "rc-035"):
        await store.inner.txn([ops.delete_tree(KEYS.rc(rc_id))])
    claiming = claims(store)
    assert await claiming.claim(shard, list(shard), MEMBER, session) == 2
    assert await store.keys(KEYS.rc("rc-003")) == await store.keys(KEYS.rc("rc-035")) == []
    assert sum(rc.session == session for rc in shard) == 38


async def test_nothing_is_claimed_without_a_membership(store: ScriptedStore) -> None:
    """A farm whose member record was removed claims nothing and gets `OwnershipLost`."""
    session, shard = await member(store), await shard_of(store, 3)
    await store.delete(MEMBER)
    with pytest.raises(OwnershipLost):
        await claims(store).claim(shard, list(shard), MEMBER, session)
    assert await store.get(KEYS.owner("rc-000")) is None


async def test_a_release_frees_and_keeps_the_history(store: ScriptedStore) -> None:
    """A released RC is free at once; its record keeps the last owner and the number of acquisitions."""
    session, shard = await member(store), await shard_of(store, 70)
    claiming = claims(store)
    await claiming.claim(shard, list(shard), MEMBER, session)
    await claiming.release(shard, list(shard), session)
    assert {rc.session for rc in shard} == {None}
    entry = require(await store.get(KEYS.owner("rc-000")))
    assert decode(Owner, entry.key, entry.value).farm == "farm-a"
    assert entry.lock_index == 1


async def test_a_release_takes_nothing_from_another_owner(store: ScriptedStore) -> None:
    """Giving back what is not ours any more leaves the new owner's lock; the rest is given back."""
    session, shard = await member(store), await shard_of(store, 3)
    claiming = claims(store)
    await claiming.claim(shard, list(shard), MEMBER, session)
    other = await member(store, KEYS.farm("farm-b"))
    mine, theirs = encode(Owner("farm-a", "")), encode(Owner("farm-b", ""))
    await store.txn([ops.unlock(KEYS.owner("rc-001"), mine, session)])
    await store.txn([ops.lock(KEYS.owner("rc-001"), theirs, other)])
    await store.delete(KEYS.owner("rc-002"))
    await claiming.release(shard, list(shard), session)
    sessions = [entry.session if (entry := await store.get(KEYS.owner(rc.id))) else "absent" for rc in shard]
    assert sessions == [None, other, "absent"]


async def test_a_key_without_a_session_is_free(store: ScriptedStore) -> None:
    """An owner key that merely lies there does not count as locked."""
    await store.put(KEYS.owner("rc-000"), encode(Owner("farm-b", "")))
    [rc] = await shard_of(store, 1)
    assert claims(store).wants(rc)


@pytest.mark.parametrize(
    ("selector", "labels", "wanted"),
    [
        ("", {}, True),
        ("", {"team": "a"}, True),
        ("team=a", {"team": "a"}, True),
        ("team=a", {"team": "b"}, False),
        ("team=a", {}, False),
    ],
)
async def test_the_selector_decides(store: ScriptedStore, selector: str, labels: dict[str, str], wanted: bool) -> None:
    """A farm wants the free RCs whose labels its selector matches."""
    spec = RCSpec(id="web", manifest=MANIFEST, replicas_desired=1, rc_labels=labels)
    await store.put(KEYS.spec("web"), encode(spec))
    [rc] = await shard_of(store, 0)
    assert claims(store, selector).wants(rc) is wanted


async def test_an_unreadable_rc_is_for_a_farm_that_takes_everything(store: ScriptedStore) -> None:
    """Its labels are unknown; a farm without a selector claims it and reports it."""
    await store.put(KEYS.spec("bad"), b"nonsense")
    shard = await shard_of(store, 0)
    bad = require(shard.rcs.get("bad"))
    assert claims(store).wants(bad)
    assert not claims(store, "team=a").wants(bad)


async def test_what_is_left_of_a_deleted_rc_is_for_any_farm(store: ScriptedStore) -> None:
    """A lock without an RC is claimed, for removal, by any farm; with pods that may run it is claimed by none."""
    await store.put(KEYS.owner("husk"), encode(Owner("farm-dead", "")))
    await store.put(KEYS.owner("pods"), encode(Owner("farm-dead", "")))
    await store.put(KEYS.pod("pods", "n1"), b"{}")
    shard = await shard_of(store, 0)
    husk, with_pods = shard.rcs.get("husk"), shard.rcs.get("pods")
    assert husk is not None
    assert with_pods is not None
    assert claims(store, "team=a").wants(husk)
    assert not claims(store).wants(with_pods)
    assert not claims(store).wants(RC("nothing", shard))
