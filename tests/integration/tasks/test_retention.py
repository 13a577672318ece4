"""What retention needs of a store: a lock that one holds at a time, and names without records."""

from __future__ import annotations

import pytest

from controllers.ownership.membership import Leadership
from controllers.tasks.engine.archive import Archive
from store.kv import ops
from store.kv.protocol import OwnershipLost, SessionSpec, Store
from store.schema.keys import Keys
from store.schema.tasks import TaskOwner
from tests.support.tasks.engines import World


async def test_one_leads_until_its_session_ends(any_store: Store, root: str) -> None:
    keys = Keys(root)
    sessions = [await any_store.create_session(SessionSpec(f"engine {name}")) for name in "ab"]
    first, second = (
        Leadership(any_store, keys.retention, session.id, TaskOwner(name, ""))
        for name, session in zip("ab", sessions, strict=True)
    )
    work = [ops.put(f"{root}/work", b"")]
    assert [await each.obtain() for each in (first, second, first, second)] == [True, False, True, False]
    with pytest.raises(OwnershipLost):
        await any_store.txn([second.fence, *work])
    await any_store.txn([first.fence, *work])
    await any_store.destroy_session(sessions[0].id)
    assert await second.obtain()
    await any_store.txn([second.fence, *work])
    with pytest.raises(OwnershipLost):
        await any_store.txn([first.fence, *work])
    assert not await first.obtain()
    await any_store.destroy_session(sessions[1].id)


async def test_ended_and_live_executions_of_other_engines_are_known(any_store: Store, root: str) -> None:
    keys = Keys(root, shards=2)
    world, archive = World(any_store, keys), Archive(any_store, keys)
    await archive.read({})
    assert archive.ended == {}
    for number in range(3):
        await world.finished(f"task-{number}", ended_at=1e9 + number)
    await world.submit("live", depends_on=("task-1",))
    for _ in range(2):
        await archive.read({})
        assert {task: each.ended_at for task, each in archive.ended.items()} == {
            f"task-{number}": 1e9 + number for number in range(3)
        }
        assert archive.awaited == {"task-1"}
