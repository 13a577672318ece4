"""The role `rcfarm tasks` with a job API: secrets from the settings' places, logs without them, and pushes."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import structlog
from aiohttp import ClientSession, web
from prometheus_client import CollectorRegistry

from rcfarm.config.settings import Settings, TasksSettings
from rcfarm.daemon.logging import configure
from rcfarm.roles.tasks import TasksRole
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.tasks.engines import World
from tests.support.tasks.job_servers import Handler, Site, example_task
from tests.support.waiting import background, until

SECRET = "s3cret-of-the-api"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.start()
    yield site
    await site.stop()


@pytest.fixture
def logged() -> io.StringIO:
    """Return a stream that has every event."""
    stream = io.StringIO()
    configure("debug", "json", stream=stream)
    return stream


async def _free_port() -> int:
    listener = Site()
    await listener.start()
    await listener.stop()
    return int(listener.url.rpartition(":")[2])


async def test_a_push_wakes_its_execution_and_secrets_stay_out_of_the_log(
    site: Site, logged: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One secret is in the directory, another in a variable with the prefix of the settings."""
    (tmp_path / "api").write_text(f"{SECRET}\n")
    monkeypatch.setenv("MINE_push", "s3cret-of-pushes")
    port = await _free_port()
    url = f"http://127.0.0.1:{port}/push"
    tasks = TasksSettings(
        name="engine-1",
        data="memory:",
        secrets_dir=str(tmp_path),
        secrets_prefix="MINE_",
        push_listen=f"127.0.0.1:{port}",
        push_url=url,
        push_secret="push",
        http_remotes={"squares": {"url": site.url, "auth": {"secret": "api"}}},
    )
    store, keys = EmbeddedStore(), Keys()
    world = World(store, keys)
    role = TasksRole(msgspec.structs.replace(Settings(), tasks=tasks), store, CollectorRegistry())
    async with background(role.run()):
        await until(lambda: role.conditions() and all(each.holds for each in role.conditions()), within=10)
        fields = example_task(
            create={"path": "/jobs", "body": {"number": 3, "seconds": 0.2, "push_url": "{{ .PushUrl }}"}}
        )
        await world.submit("one", **fields)
        await until(lambda: len(site.server.jobs), within=10)
        created = time.monotonic()
        state = await world.until_done("one")
        assert time.monotonic() - created < 0.9  # without a push, the second read is after a second
        assert state.phase == "PhaseSuccess"

        site.faults.append(_echo)
        await world.submit("two", **fields)
        state = await world.until_done("two")
        [address] = {job.push_url for job in list(site.server.jobs.values())[:1]}
        name = address.split("/")[-2]
        async with ClientSession() as session:
            assert (await session.post(f"{url}/{name}/wrong", data=b"x" * 10_000_000)).status == 403
            assert (await session.post(address)).status == 404  # it has ended

    structlog.get_logger("later").info(f"still without {SECRET}")
    assert '"one"' in logged.getvalue()
    assert "still without [redacted]" in logged.getvalue()
    assert SECRET not in logged.getvalue()
    assert any(each.headers.get("Authorization") == f"Bearer {SECRET}" for each in site.requests)
    await store.close()


async def _echo(request: web.Request, handler: Handler) -> web.StreamResponse:
    return web.Response(status=422, text=f"no: {request.headers['Authorization']}")
