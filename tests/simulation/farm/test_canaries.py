"""Canaries on nodes that a selector names, as a farm chooses them."""

from __future__ import annotations

from msgspec.structs import replace

from rcfarm.operations.rc_spec import with_manifest
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.manifest import digest
from store.schema.records import ALL_NODES, UpdatePolicy, encode
from tests.support.farm.fleet import Fleet, manifest, running_farm

CHANGED = manifest("web", version=2)


async def test_a_farm_looks_at_the_labels_of_now(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """No node matches: nothing is changed, with a reason. As soon as one has the label, its pod is the canary."""
    await fleet.add_nodes(["n1", "n2", "n3"], {"rack": "a"})
    async with running_farm(store, keys):
        await fleet.create("web", ALL_NODES)
        await fleet.until_placed("web", ["n1", "n2", "n3"])
        await fleet.set_health("web", {"n1": "passing", "n2": "passing", "n3": "passing"})
        policy = UpdatePolicy(canary_selector="rack=b")
        await fleet.rcs.update(
            "web", lambda spec: replace(with_manifest(CHANGED)(spec), update=policy), raw_manifest=CHANGED
        )

        async def waits() -> bool:
            status = await fleet.status("web")
            reasons = status.reasons if status else ()
            return any("on a live node that matches the canary_selector 'rack=b'" in each.message for each in reasons)

        await fleet.until(waits)
        await fleet.relabel("n2", {"rack": "b"})

        async def is_changed() -> bool:
            intents = await fleet.intents_of("web")
            return [node for node, intent in intents.items() if intent.manifest == digest(CHANGED)] == ["n2"]

        await fleet.until(is_changed)


async def test_a_selector_that_cannot_be_read(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """Written past the operations: the RC is quarantined, and the reason names the field."""
    await fleet.add_nodes(["n1"])
    spec = await fleet.create("web", 1)
    await store.put(keys.spec("web"), encode(replace(spec, update=UpdatePolicy(canary_selector="a in (b"))))
    async with running_farm(store, keys):
        status = await fleet.until_state("web", "quarantined")
        assert [reason.code for reason in status.reasons] == ["bad_selector"]
        assert status.reasons[0].message.startswith("update.canary_selector: ")
