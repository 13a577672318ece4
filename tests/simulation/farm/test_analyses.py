"""Who runs the analyses of a rollout: the owner of the RC, and nobody else, from the canary to the end."""

from __future__ import annotations

from pathlib import Path

from controllers.ownership.membership import assignment
from rcfarm.operations.rc_spec import with_manifest
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys, all_shards, shard_of
from store.schema.manifest import digest
from store.schema.records import Analysis, Rollout, UpdatePolicy, decode
from tests.support.farm.fleet import Fleet, manifest, running_farm


async def test_a_handed_over_rc_is_analysed_by_its_next_owner_alone(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, tmp_path: Path
) -> None:
    """The former owner's command is killed in mid-run. The next owner's succeeds: the rollout is done, nothing runs."""
    preferred = assignment(all_shards(keys.shards), ["farm-a", "farm-b"])
    rc_id = next(name for number in range(99) if preferred[shard_of(name := f"rc-{number}", keys.shards)] == "farm-b")
    pids = tmp_path / "pids"

    def started() -> list[int]:
        return [int(line) for line in pids.read_text().split()] if pids.exists() else []

    def running() -> list[int]:
        return [pid for pid in started() if _is_alive(pid)]

    def commands(script: str) -> dict[str, tuple[str, ...]]:
        return {"smoke": ("/bin/sh", "-c", f"echo $$ >> {pids}; {script}")}

    hangs, passes = commands("sleep 60"), commands("exit 0")
    policy = UpdatePolicy(
        min_healthy_time=0.0, analysis=(Analysis(name="a", command="smoke", interval=1.0, timeout=99),)
    )
    await fleet.add_nodes(["n1"])
    async with running_farm(store, keys, "farm-a", analysis_commands=hangs, handover_interval=0.01):
        await fleet.create(rc_id, 1, update=policy)
        await fleet.until_placed(rc_id, ["n1"])
        await fleet.set_health(rc_id, {"n1": "passing"})
        changed = manifest(rc_id, config={"version": 2})
        await fleet.rcs.update(rc_id, with_manifest(changed), raw_manifest=changed)
        await fleet.until(lambda: _state(store, keys, rc_id, "canary"))
        await fleet.set_health(rc_id, {"n1": "passing"}, manifest=digest(changed))
        await fleet.until(lambda: len(running()) == 1)
        async with running_farm(store, keys, "farm-b", analysis_commands=passes, handover_interval=0.01):
            await fleet.until(lambda: _state(store, keys, rc_id, "done"))
            assert running() == []
            assert len(started()) == 3, "one that was killed, one for the canary, one for the soak"


async def _state(store: EmbeddedStore, keys: Keys, rc_id: str, state: str) -> bool:
    entry = await store.get(keys.rollout(rc_id))
    return entry is not None and decode(Rollout, entry.key, entry.value).state == state


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
