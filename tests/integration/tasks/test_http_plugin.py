"""`http` tasks in a real engine against the example's job server over real connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp import ClientSession, web

from controllers.tasks.io.data import open_data
from controllers.tasks.io.literals import decode_literals
from controllers.tasks.io.secrets import SecretManager
from controllers.tasks.patterns.remote import WebApiConfig
from controllers.tasks.patterns.webapi import webapi_entry
from controllers.tasks.plugins.http import HttpPlugin, push_routes
from controllers.tasks.plugins.http_api import Auth, Batch, HttpSettings, Remote
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support import require
from tests.support.tasks.engines import World, engine_on, running
from tests.support.tasks.job_servers import Site, answer, example_task, lost_answer
from tests.support.waiting import until

SECRET = "s3cret-t0ken-of-the-test"
QUICK = {"number": 12, "seconds": 0.0}


class Stage:
    """The server, a store, and an engine with the plugin."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.store = EmbeddedStore(None)
        self.keys = Keys(shards=4)
        self.world = World(self.store, self.keys)
        self.secrets = SecretManager(environ={"RCFARM_SECRET_api": SECRET, "RCFARM_SECRET_push": "push-s3cret"})
        self.data = open_data("memory:")
        self.plugin: HttpPlugin

    def engine(
        self, remote: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **settings: Any
    ) -> Any:
        remotes = {"squares": Remote(url=self.site.url, **(remote or {}))}
        config = HttpSettings(remotes=remotes, limits=WebApiConfig(**(limits or {})), **settings)
        self.plugin = HttpPlugin(config, redactor=self.secrets.redactor)
        entry = webapi_entry(lambda: self.plugin, "http", ("http",))
        return running(engine_on(self.store, self.keys, entry, virtual=False, secrets=self.secrets, data=self.data))

    async def submit(self, task_id: str = "one", config: dict[str, Any] | None = None, **fields: Any) -> None:
        task = {**example_task(**(config or {})), "inputs": QUICK, **fields}
        await self.world.submit(task_id, **task)

    async def everything(self) -> str:
        """Return all that is stored."""
        entries = (await self.store.list(self.keys.root + "/")).entries
        return " ".join(f"{entry.key} {entry.value.decode(errors='replace')}" for entry in entries)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    site = Site()
    await site.start()
    stage = Stage(site)
    yield stage
    assert stage.plugin._session is None or stage.plugin._session.closed
    await site.stop()
    await stage.store.close()


async def test_the_example_runs_to_its_outputs(stage: Stage) -> None:
    """Inputs keep their JSON types on the way; outputs, progress and the link to the job come back."""
    async with stage.engine():
        await stage.submit()
        state = await stage.world.until_done("one")
    [job] = stage.site.server.jobs.values()
    assert (job.number, job.seconds) == (12, 0.0)
    assert state.phase == "PhaseSuccess"
    outputs = decode_literals(await stage.data.read(f"{stage.data.base}/executions/one/0/outputs.json"))
    assert outputs == {"square": 144}
    assert state.info is not None
    assert state.info["custom_info"] == {"job": job.id, "progress": 1.0}
    assert state.info["logs"][0]["uri"].endswith(job.id)


async def test_a_job_that_fails_is_the_users_failure_with_its_message(stage: Stage) -> None:
    async with stage.engine():
        await stage.submit(inputs={"number": -1, "seconds": 0})
        state = await stage.world.until_done("one")
    assert state.error is not None
    assert (state.error.code, state.error.message, state.error.kind) == ("RemoteFailed", "-1 is negative", "USER")


async def test_fifty_jobs_while_the_server_is_down_for_a_while(stage: Stage) -> None:
    """Each execution has one job, and ends."""
    ids = [f"job-{number}" for number in range(50)]
    async with stage.engine():
        for number, task_id in enumerate(ids):
            await stage.submit(task_id, inputs={"number": number, "seconds": 0.3})
        await stage.world.until(lambda: len(stage.site.server.jobs) >= 20)
        await stage.site.stop()
        await asyncio.sleep(0.5)
        await stage.site.start()
        await stage.world.until_done(*ids)
        phases = {(await stage.world.state(task_id)).phase for task_id in ids}  # type: ignore[union-attr]
    assert phases == {"PhaseSuccess"}
    assert len(stage.site.server.jobs) == 50
    assert sorted(job.number for job in stage.site.server.jobs.values()) == list(range(50))


async def test_an_answer_that_is_lost_makes_no_second_job(stage: Stage) -> None:
    async with stage.engine():
        stage.site.faults = [lost_answer]
        await stage.submit()
        state = await stage.world.until_done("one")
    assert state.phase == "PhaseSuccess"
    assert len(stage.site.server.jobs) == 1


async def test_without_idempotency_a_lost_answer_waits_for_an_operator(stage: Stage) -> None:
    async with stage.engine():
        stage.site.faults = [lost_answer]
        await stage.submit(config={"idempotency_header": ""})
        await stage.world.until_state("one", lambda state: [w.code for w in state.reasons] == ["RemoteUnknown"])
    assert len(stage.site.server.jobs) == 1


async def test_retry_after_is_honoured(stage: Stage) -> None:
    async with stage.engine():
        stage.site.faults = [answer(429, Retry_After="1")]
        began = time.monotonic()
        await stage.submit()
        waiting = await stage.world.until_state("one", lambda state: state.phase == "PhaseWaitingForResources")
        assert "no more calls for 1 s" in waiting.reason
        await stage.world.until_done("one")
    assert time.monotonic() - began >= 1.0
    assert len(stage.site.server.jobs) == 1


async def test_a_redirect_is_never_followed(stage: Stage) -> None:
    async with stage.engine():
        stage.site.faults = [answer(307, Location="http://127.0.0.1:9/jobs")]
        await stage.submit()
        state = await stage.world.until_done("one")
    assert state.error is not None
    assert state.error.code == "RemoteRefused"
    assert "redirects are not followed" in state.error.message
    assert len(stage.site.requests) == 1


async def test_a_secret_reaches_the_server_and_nothing_else(stage: Stage) -> None:
    """Authorization and an inserted secret are sent; an echo of them in an error or an answer is removed."""
    remote = {"auth": Auth("api"), "secrets": ("api",)}
    body = {"number": "{{ .Inputs.number }}", "seconds": 0, "token": "{{ .Secrets.api }}"}
    async with stage.engine(remote):
        stage.site.faults = [answer(500, f"bad token {SECRET}"), answer(201, f'{{"id": "{SECRET}", "status": "odd"}}')]
        await stage.submit(config={"create": {"path": "/jobs", "body": body}})
        await stage.world.until(lambda: len(stage.site.requests) >= 2)
        await stage.world.until_state("one", lambda state: "odd" in state.round_error)
        stored = await stage.everything()
    assert stage.site.requests[0].headers["Authorization"] == f"Bearer {SECRET}"
    assert SECRET in (await stage.site.requests[0].text())
    assert SECRET not in stored
    assert "bad token [redacted]" in stored


async def test_an_answer_that_is_too_large_is_an_error_of_its_own(stage: Stage) -> None:
    async with stage.engine({"max_body": 1000}, {"max_system_failures": 0}):
        stage.site.faults = [answer(201, '"' + "x" * 5000 + '"')] * 9
        await stage.submit()
        state = await stage.world.until_state("one", lambda state: state.error)
    assert "more than 1000 bytes" in require(state.error).message


async def test_an_abort_cancels_the_job(stage: Stage) -> None:
    async with stage.engine():
        await stage.submit(inputs={"number": 1, "seconds": 1000})
        await stage.world.until_state("one", lambda state: state.phase == "PhaseRunning")
        await stage.world.abort("one")
        await stage.world.until_done("one")
    [job] = stage.site.server.jobs.values()
    assert job.cancelled


async def test_jobs_are_read_in_batches_where_the_server_can(stage: Stage) -> None:
    batch = Batch(path="/jobs", query={"ids": "{{ .Jobs }}"}, jobs="$.jobs")
    ids = [f"job-{number}" for number in range(10)]
    async with stage.engine({"batch": batch}, {"batch_size": 50, "workers": 1}):
        for task_id in ids:
            await stage.submit(task_id, inputs={"number": 2, "seconds": 1000})

        def largest() -> int:
            requests = [each.query for each in stage.site.requests if "ids" in each.query]
            return max((len(query["ids"].split(",")) for query in requests), default=0)

        await until(lambda: largest() > 1, "a batch")
        for job in stage.site.server.jobs.values():
            job.seconds = 0
        await stage.world.until_done(*ids)


async def test_a_push_with_the_right_token_ends_the_wait(stage: Stage) -> None:
    """The server calls the address that it was given; a wrong token is refused, an unknown job not found."""
    body = {"number": 3, "seconds": 0.2, "push_url": "{{ .PushUrl }}"}
    app = web.Application()
    runner = web.AppRunner(app, access_log=None)
    site: list[web.TCPSite] = []
    listener = Site()
    await listener.start()  # reserves a port
    await listener.stop()
    push_url = f"{listener.url}/push"
    async with stage.engine(push_url=push_url, push_secret="push"):
        pushed = web.Application()
        pushed.add_routes(push_routes(stage.plugin))
        app.add_subapp("/push/", pushed)
        await runner.setup()
        site.append(web.TCPSite(runner, "127.0.0.1", int(listener.url.rpartition(":")[2])))
        await site[0].start()
        await stage.submit(config={"create": {"path": "/jobs", "body": body}})
        began = time.monotonic()
        await stage.world.until_done("one")
        assert time.monotonic() - began < 0.9  # without it, the second read is after a second
        [job] = stage.site.server.jobs.values()
        name, token = job.push_url.split("/")[-2:]
        async with ClientSession() as session:
            assert (await session.post(f"{push_url}/{name}/wrong")).status == 403
            assert (await session.post(f"{push_url}/{name}/{token}")).status == 404
    assert token not in await stage.everything()
    await runner.cleanup()


@pytest.mark.parametrize(
    ("config", "inputs", "words"),
    [
        ({"remote": "elsewhere"}, QUICK, "'elsewhere' is not a remote system"),
        ({"get": {"path": "/jobs/{{ .Inputs.x }}"}, "create": {"path": "/a/{{ .Inputs.x }}"}}, {"x": ".."}, "is '..'"),
        ({"create": {"path": "/jobs", "headers": {"Host": "other"}}}, QUICK, "Host can't be set"),
        ({"create": {"path": "/jobs", "headers": {"X-A": "{{ .Inputs.x }}"}}}, {"x": "a\r\nb: c"}, "control character"),
        ({"create": {"path": "/jobs", "body": "{{ .Secrets.api }}"}}, QUICK, "not one that tasks may send"),
        ({"create": {"path": "/jobs", "body": "{{ .Inputs.x }}"}}, {}, "there is no input 'x'"),
        ({"phases": {"done": "finished"}}, QUICK, "finished"),
        ({"phases": {}, "create": {"path": "", "body": {"a": "{{ .Jobs }}"}}}, QUICK, "no {{ .Jobs }}"),
    ],
)
async def test_a_wrong_config_fails_at_once_and_creates_nothing(
    stage: Stage, config: dict[str, Any], inputs: dict[str, Any], words: str
) -> None:
    async with stage.engine():
        await stage.submit(config=config, inputs=inputs)
        state = await stage.world.until_done("one")
    assert state.phase == "PhasePermanentFailure"
    assert words in require(state.error).message
    assert stage.site.server.jobs == {}


async def test_an_input_is_a_segment_of_the_path_whatever_it_contains(stage: Stage) -> None:
    """Neither a slash nor a query nor the text of a placeholder gets another meaning."""
    wild = "a/../b?x=1#{{ .Secrets.api }}"
    async with stage.engine({"secrets": ("api",)}):
        stage.site.faults = [answer(400)]
        await stage.submit(
            config={"create": {"path": "/jobs/{{ .Inputs.x }}", "query": {"q": "{{.Inputs.x}}"}}}, inputs={"x": wild}
        )
        await stage.world.until_done("one")
    [request] = stage.site.requests
    assert [unquote(part) for part in request.rel_url.raw_parts] == ["/", "jobs", wild]
    assert request.query == {"q": wild}
