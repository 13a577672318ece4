"""Bad input of every kind at once, in a fleet of real processes: each is named where operators look, and has no effect
on anything else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from store.schema.keys import shard_of
from store.schema.manifest import digest
from store.schema.records import RCSpec, encode
from tests.support import require
from tests.support.consul.server import ConsulServer
from tests.support.farm.fleet import manifest
from tests.support.hostile import DEEP, explosive_yaml
from tests.support.kube.faults.odd_server import serving
from tests.support.programs.installation import Daemon, Installation, installation

NODES = ["node-1", "node-2"]


@pytest.fixture
async def site(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """A farm, two agents, and a healthy RC."""
    async with installation(consul_server, tmp_path / "site") as site:
        site.farm("farm-a")
        await site.start_agents(*NODES)
        await site.fleet.create("good", 1)
        assert await is_well(site, 1)
        yield site


async def put_rc(site: Installation, rc_id: str, raw_manifest: bytes, **fields: Any) -> None:
    """Write an RC past every check, as only a foreign program could."""
    await site.store.put(site.keys.manifest(digest(raw_manifest)), raw_manifest)
    spec = RCSpec(id=rc_id, manifest=digest(raw_manifest), replicas_desired=1, **fields)
    await site.store.put(site.keys.spec(rc_id), encode(spec))


async def until_explained(site: Installation, rc_id: str, *words: str) -> None:
    """Wait until `rc status` and `rc explain` contain this text."""

    async def said() -> bool:
        shown = [(await site.cli("rc", command, rc_id)).out for command in ("status", "explain")]
        return all(word in out for out in shown for word in words)

    await site.until(said, f"{rc_id} says {words}")


async def until_left_out(site: Installation, daemon: Daemon, key: str, reason: str) -> None:
    event = await site.until_logged(daemon, "Left out a record that can't be decoded", key=f"{site.root}/{key}")
    assert reason in event["reason"]


async def is_well(site: Installation, replicas: int) -> bool:
    """Return whether the good RC follows a change of its scale."""
    ran = await site.cli("rc", "scale", "good", str(replicas), "--wait-healthy", "1")
    return ran.out == f"rc good scaled: {replicas} of {replicas} placed, {replicas} healthy\n"


async def test_malformed_records(site: Installation) -> None:
    """Unreadable records are named in the farm's log, by the commands and by the doctor, each with its key, field and
    reason; other RCs are scaled normally."""
    store, keys, torn = site.store, site.keys, f"rcs/{shard_of('torn')}/torn"
    await store.put(keys.spec("torn"), b'{"id":"torn","manifest":"x"}')
    await store.put(keys.node_spec("node-9"), b'{"name":"node-9","labels":{"pool":3}}')
    await store.put(keys.farm("junk"), b"junk")
    await store.put(keys.rc("good") + "strange", b"x")
    await store.put(keys.intent("node-1", "alien"), b'{"manifest":7}')
    farm, agent = site.daemons[:2]
    await until_left_out(site, farm, f"{torn}/spec", "missing required field `replicas_desired`")
    await until_left_out(site, farm, "nodes/node-9/spec", "Expected `str`, got `int` - at `$.labels[...]`")
    await until_left_out(site, farm, "farms/junk", "JSON is malformed")
    await until_left_out(site, farm, f"rcs/{shard_of('good')}/good/strange", "not a key of the layout")
    await until_left_out(site, agent, "intent/node-1/alien", "Expected `str`, got `int` - at `$.manifest`")
    await until_explained(site, "torn", "unreadable", "missing required field `replicas_desired`")
    for command in (["rc", "scale", "torn", "2"], ["rc", "get", "torn"]):
        ran = await site.cli(*command)
        assert ran.code == 1
        assert ran.err.startswith(f"error: rcfarm/{torn}/spec: not a valid RCSpec: ")
        assert len(ran.err.splitlines()) == 1
    doctor = await site.cli("doctor")
    assert doctor.code == 1
    for key in (f"{torn}/spec", "nodes/node-9/spec", "farms/junk", "intent/node-1/alien", "good/strange"):
        assert f"{key}: " in doctor.out
    assert "node-9" in (await site.cli("node", "list")).err
    assert await is_well(site, 2)


async def test_records_that_are_nested_beyond_any_stack(site: Installation) -> None:
    """One such record in each tree, as any agent's token may write it: every daemon goes on and a new one starts, the
    commands list it as unreadable, the doctor names it, and other RCs are scaled normally."""
    store, keys = site.store, site.keys
    bad = {
        "node spec": keys.node_spec("evil"),
        "node alive": keys.node_alive("wicked"),
        "spec": keys.spec("deep"),
        "mutation": keys.mutation("deep"),
        "placement": keys.pod("deep", "node-1"),
        "health": keys.health("deep", "node-1"),
        "intent": keys.intent("node-1", "deep"),
        "reality": keys.reality("node-2", "deep"),
        "farm": keys.farm("deep"),
        "reservations": keys.reservations("node-1"),
    }
    for key in (*bad.values(), keys.owner("deep")):
        await store.put(key, DEEP)  # the owner's is written again by the farm that claims the RC
    for daemon, name in ((site.daemons[0], "node spec"), (site.daemons[0], "spec"), (site.daemons[1], "intent")):
        await until_left_out(site, daemon, bad[name].removeprefix("rcfarm/"), "nested more than 200 levels deep")

    site.farm("farm-b")
    site.agent("node-3")
    await site.until_registered("node-3")
    assert await is_well(site, 2)

    doctor = await site.cli("doctor")
    assert doctor.code == 1
    assert all(f"{key}: " in doctor.out for key in bad.values()), doctor.out
    listed = await site.cli("node", "list")
    assert listed.code == 0
    assert [line.split()[:2] for line in listed.out.splitlines()[1:2]] == [["evil", "unreadable"]]
    assert [line.split()[1] for line in (await site.cli("rc", "list")).out.splitlines()[1:]] == [
        "unreadable",
        "converged",
    ]
    status = await site.cli("status")
    assert status.code == 0
    assert f"unreadable: {bad['node spec']}: not a valid NodeSpec: nested more than 200 levels deep" in status.out
    assert all(daemon.is_running for daemon in site.daemons)


async def test_damaged_records_are_written_again(site: Installation) -> None:
    """An intent and a status that were overwritten with garbage are written again, without touching the process."""
    before = await site.fleet.reality("node-1", "good")
    await site.store.put(site.keys.intent("node-1", "good"), b"garbage")
    await site.store.put(site.keys.status("good"), b"garbage")

    async def restored() -> bool:
        intent = await site.store.get(site.keys.intent("node-1", "good"))
        return intent is not None and intent.value != b"garbage"

    await site.until(restored, "the intent is written again")
    assert await is_well(site, 2)
    after = await site.fleet.reality("node-1", "good")
    assert before is not None
    assert require(after).launchables == before.launchables
    status = require(await site.fleet.status("good"))
    assert status.state == "converged"


async def test_specs_that_can_not_be_met(site: Installation) -> None:
    """An RC with a bad selector, or with a manifest that is missing, malformed or too large, is quarantined with the
    reason."""
    await put_rc(site, "selector", manifest("selector"), node_selector="pool in (web")
    await put_rc(site, "typo", b'{"id":"typo","launchables":{"main":{"comand":["x"]}}}')
    await put_rc(site, "huge", manifest("huge", blob="x" * 300_000))
    await site.store.put(site.keys.spec("missing"), encode(RCSpec(id="missing", manifest="0" * 64, replicas_desired=1)))
    await put_rc(site, "growing", explosive_yaml())
    await until_explained(site, "growing", "quarantined", "more than 5000 values with aliases written out")
    await until_explained(site, "selector", "quarantined", "bad_selector", "a parenthesis is not closed")
    await until_explained(site, "typo", "quarantined", "manifest_unusable", "comand")
    await until_explained(site, "huge", "quarantined", "the limit is 262144")
    await until_explained(site, "missing", "quarantined", "is not in the store: give the RC its manifest again")
    doctor = await site.cli("doctor")
    for rc_id in ("selector", "typo", "huge", "missing"):
        assert f"rc {rc_id} keeps failing: " in doctor.out
    assert await is_well(site, 2)


async def test_pods_that_can_not_run(site: Installation, tmp_path: Path) -> None:
    """A wrong digest, a port in use, a missing program: `rc create` ends with the reason of each node, and the RC's
    status repeats it. Other pods of the same nodes are not touched."""

    async def archive(_: web.Request) -> web.Response:
        return web.Response(body=b"content")

    async with serving(archive) as address:
        taken = socket.create_server(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        cases: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
            "digest": (
                {"artifact": {"url": f"{address}/archive", "sha256": "0" * 64}, "command": ["x"]},
                {},
                "its sha256 is not the one that the manifest names",
            ),
            "port": ({"command": ["sleep", "1000"]}, {"http": port}, f"ports.http: {port} is in use"),
            "program": ({"command": ["/no/such/program"]}, {}, "/no/such/program"),
        }

        async def check(rc_id: str, launchable: dict[str, Any], ports: dict[str, int], words: str) -> None:
            path = tmp_path / f"{rc_id}.json"
            path.write_text(json.dumps({"id": rc_id, "launchables": {"main": launchable}, "ports": ports}))
            ran = await site.cli("rc", "create", "-m", str(path), "--id", rc_id, "--replicas", "2", "--timeout", "8")
            assert ran.code == 2, ran.out
            for node in NODES:
                assert f"{node}: failed" in ran.out
            assert ran.out.count(words) == 2, ran.out
            assert words in (await site.cli("rc", "status", rc_id)).out
            await site.until_logged(site.daemons[1], "The pod could not be reconciled with its intent", pod=rc_id)

        with taken:
            await asyncio.gather(*(check(rc_id, *case) for rc_id, case in cases.items()))
    assert await is_well(site, 2)


async def test_an_unreadable_layout(site: Installation) -> None:
    """With an unreadable layout record no daemon starts to work: daemons exit, commands refuse, both name the key."""
    await site.store.put(site.keys.meta, b'{"schema":"x"}')
    farm = site.farm("farm-b")
    event = await site.until_logged(farm, "Component failed; stopping the daemon")
    assert event["error"].startswith("rcfarm/meta: not a valid Meta: ")
    assert "exception" not in event
    await site.until(lambda: not farm.is_running, "the farm ends")
    ran = await site.cli("rc", "list")
    assert (ran.code, ran.err.startswith("error: rcfarm/meta: not a valid Meta: ")) == (1, True)
    await site.store.put(site.keys.meta, b'{"schema":99,"shards":32}')
    ran = await site.cli("rc", "list")
    assert "the store is of schema 99" in ran.err
