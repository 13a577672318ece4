"""The façade: programs written for Consul work against an embedded store, unchanged.

Consul's own programs and python-consul2 are run against it, and a list of plain requests is sent to it and to a real
Consul, whose answers must be the same.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import consul as python_consul
import pytest

from store.consul.client import ConsulSettings
from store.consul.store import ConsulStore
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Denied, SessionSpec
from tests.support import require
from tests.support.consul.server import ConsulServer, consul_binary, opened
from tests.support.waiting import until

TOKEN = "a-secret-of-many-letters"


@pytest.fixture
async def embedded() -> AsyncIterator[EmbeddedStore]:
    store = EmbeddedStore()
    yield store
    await store.close()


@pytest.fixture
async def address(embedded: EmbeddedStore) -> AsyncIterator[str]:
    """HOST:PORT of a façade without a token."""
    async with serve_consul_api(embedded, node="consul-test") as address:
        yield address


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Api:
    """Plain requests to one façade."""

    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self._http, self._address = http, address

    async def get(self, path: str) -> str:
        async with self._http.get(f"http://{self._address}{path}") as response:
            return await response.text()

    async def put(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body)
        async with self._http.put(f"http://{self._address}{path}", data=data) as response:
            return await response.text()

    async def bound_session(self, check: str, *, ttl: str) -> str:
        """Create a session that is bound to a new check. Return its id."""
        service = {"Name": "s", "ID": f"s-{check}", "Check": {"CheckID": check, "TTL": ttl, "Status": "passing"}}
        await self.put("/v1/agent/service/register", service)
        wanted = {"TTL": "60s", "LockDelay": "0s", "NodeChecks": [], "ServiceChecks": [{"ID": check}]}
        return str(json.loads(await self.put("/v1/session/create", wanted))["ID"])


@pytest.fixture
def api(http: aiohttp.ClientSession, address: str) -> Api:
    return Api(http, address)


class Program:
    """Consul's command line program, against one address; `consul lock` runs its children in `/bin/sh`."""

    def __init__(self, address: str, **environment: str) -> None:
        self._environment = {**os.environ, "SHELL": "/bin/sh", "CONSUL_HTTP_ADDR": address, **environment}

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run the program during the block; it and its children are killed if they have not ended by then."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            consul_binary(),
            *arguments,
            env=self._environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def __call__(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str]:
        """Return exit code and all output."""
        async with self.running(*arguments) as process:
            out, err = await process.communicate(stdin)
        return process.returncode or 0, (out + err).decode()


class TestConsulsOwnPrograms:
    async def test_consul_kv(self, embedded: EmbeddedStore, address: str) -> None:
        """`consul kv` puts, gets, lists, exports, imports, compares and deletes."""
        consul = Program(address)
        assert await consul("kv", "put", "app/name", "rcfarm") == (0, "Success! Data written to: app/name\n")
        assert await consul("kv", "get", "app/name") == (0, "rcfarm\n")
        await consul("kv", "put", "-flags=42", "app/sub/key", "two words")
        code, detailed = await consul("kv", "get", "-detailed", "app/sub/key")
        assert code == 0
        assert re.search(r"Flags +42\n", detailed)
        assert await consul("kv", "get", "-recurse", "app/") == (0, "app/name:rcfarm\napp/sub/key:two words\n")
        assert await consul("kv", "get", "-keys", "app/") == (0, "app/name\napp/sub/\n")
        assert (await consul("kv", "get", "absent"))[0] == 1
        index = str((await embedded.list("app/name")).index)
        assert (await consul("kv", "put", "-cas", "-modify-index=1", "app/name", "x"))[0] == 1
        assert (await consul("kv", "put", "-cas", f"-modify-index={index}", "app/name", "y"))[0] == 0
        code, exported = await consul("kv", "export", "app/")
        assert [entry["key"] for entry in json.loads(exported)] == ["app/name", "app/sub/key"]
        assert (await consul("kv", "delete", "-recurse", "app/"))[0] == 0
        assert await embedded.keys("") == []
        assert (await consul("kv", "import", "-", stdin=exported.encode()))[0] == 0
        entry = require(await embedded.get("app/sub/key"))
        assert (entry.value, entry.flags) == (b"two words", 42)

    async def test_consul_lock_runs_its_child_under_the_lock(self, embedded: EmbeddedStore, address: str) -> None:
        """The child runs while the lock is held, its exit code comes back, and nothing is left behind."""
        consul = Program(address)
        code, printed = await consul(
            "lock",
            "-child-exit-code",
            "-monitor-retry=3",
            "jobs/nightly",
            f"{consul_binary()} kv get -keys jobs/; exit 5",
        )
        assert code == 2  # of `consul lock`: its child failed
        assert "jobs/nightly/" in printed
        assert await embedded.keys("") == []
        assert not embedded.state.sessions

    async def test_consul_lock_excludes(self, address: str, tmp_path: Path) -> None:
        """Of three contenders only one runs at any time."""
        log = tmp_path / "log"
        child = f"echo in >> {log}; sleep 0.2; echo out >> {log}"
        programs = [Program(address)("lock", "-monitor-retry=3", "jobs/one", child) for _ in range(3)]
        assert [code for code, _ in await asyncio.gather(*programs)] == [0, 0, 0]
        assert log.read_text().split() == ["in", "out"] * 3

    async def test_consul_lock_as_a_semaphore(self, embedded: EmbeddedStore, address: str, tmp_path: Path) -> None:
        """With `-n 2` both holders get in at once."""
        meet = f"touch {tmp_path}/$$; while [ $(ls {tmp_path} | wc -l) -lt 2 ]; do sleep 0.02; done"
        programs = [Program(address)("lock", "-n", "2", "jobs/two", meet) for _ in range(2)]
        async with asyncio.timeout(30):
            assert [code for code, _ in await asyncio.gather(*programs)] == [0, 0]
        assert not [entry for entry in (await embedded.list("")).entries if entry.session]

    async def test_consul_lock_ends_its_child_when_the_lock_is_taken_away(
        self, embedded: EmbeddedStore, address: str, tmp_path: Path
    ) -> None:
        """When its session ends, `consul lock` sees it in its blocking query and stops the child."""
        # `consul lock` ends only the process that it started, not its children: so it starts the sleep directly.
        child = f"touch {tmp_path}/runs; exec sleep 60"
        async with asyncio.timeout(30), Program(address).running("lock", "jobs/lost", child) as process:
            await until((tmp_path / "runs").exists)
            for session_id in list(embedded.state.sessions):
                await embedded.destroy_session(session_id)
            _, printed = await process.communicate()
        assert b"signal: terminated" in printed

    async def test_the_token_of_consuls_variables(self, embedded: EmbeddedStore) -> None:
        """With a token set, the programs work with it and are denied without."""
        async with serve_consul_api(embedded, token=TOKEN) as address:
            assert (await Program(address, CONSUL_HTTP_TOKEN=TOKEN)("kv", "put", "a", "b"))[0] == 0
            code, printed = await Program(address)("kv", "get", "a")
        assert code == 1
        assert "403" in printed


async def test_python_consul_works(embedded: EmbeddedStore, address: str) -> None:
    """python-consul2's own client reads, writes, locks and commits."""
    host, _, port = address.partition(":")
    await asyncio.to_thread(_use_python_consul, python_consul.Consul(host=host, port=int(port)))
    assert not embedded.state.sessions
    assert [entry.key for entry in (await embedded.list("")).entries] == ["py/a", "py/lock", "py/txn"]


def _use_python_consul(client: Any) -> None:
    assert client.kv.put("py/a", "1", flags=3)
    index, found = client.kv.get("py/a")
    assert (found["Value"], found["Flags"]) == (b"1", 3)
    assert client.kv.get("py/a", index=index, wait="50ms")[0] == index
    assert client.kv.put("py/a", "2", cas=found["ModifyIndex"])
    assert not client.kv.put("py/a", "3", cas=found["ModifyIndex"])
    assert client.kv.get("py/", keys=True)[1] == ["py/a"]
    assert client.kv.get("py/absent")[1] is None
    assert client.agent.service.register("web", service_id="web-1", check=python_consul.Check.ttl("10s"))
    assert client.agent.check.ttl_pass("service:web-1")
    assert client.agent.checks()["service:web-1"]["Status"] == "passing"
    session = client.session.create(name="py", ttl=10, lock_delay=0, checks=["service:web-1"])
    assert client.session.renew(session)["Name"] == "py"
    assert client.session.info(session)[1]["TTL"] == "10s"
    assert [each["ID"] for each in client.session.list()[1]] == [session]
    assert client.kv.put("py/lock", "x", acquire=session)
    assert client.kv.put("py/lock", "y", release=session)
    value = base64.b64encode(b"v").decode()
    answer = client.txn.put([{"KV": {"Verb": "set", "Key": "py/txn", "Value": value}}])
    assert answer["Results"][0]["KV"]["Key"] == "py/txn"
    assert client.agent.service.deregister("web-1")
    assert client.session.info(session)[1] in (None, [])
    assert client.session.destroy(session)


SAME: list[tuple[str, str, Any]] = [
    ("GET", "/v1/kv/{root}/a", None),
    ("GET", "/v1/kv/{root}/a?recurse", None),
    ("GET", "/v1/kv/{root}/a?keys", None),
    ("PUT", "/v1/kv/{root}/a", b"one"),
    ("GET", "/v1/kv/{root}/a", None),
    ("GET", "/v1/kv/{root}/a?raw", None),
    ("GET", "/v1/kv/{root}/a?index=1&wait=10ms", None),
    ("PUT", "/v1/kv/{root}/a?flags=16210313421097356768", b""),
    ("PUT", "/v1/kv/{root}/a/b/c%20d", b"\x00\xff"),
    ("GET", "/v1/kv/{root}/?recurse&consistent", None),
    ("GET", "/v1/kv/{root}/?keys", None),
    ("GET", "/v1/kv/{root}/?keys&separator=/", None),
    ("GET", "/v1/kv/{root}/a?stale&consistent", None),
    ("PUT", "/v1/kv/", b"x"),
    ("GET", "/v1/kv/", None),
    ("DELETE", "/v1/kv/", None),
    ("PUT", "/v1/kv/{root}/a?cas=0", b"x"),
    ("PUT", "/v1/kv/{root}/new?cas=0", b"x"),
    ("DELETE", "/v1/kv/{root}/new?cas=1", None),
    ("DELETE", "/v1/kv/{root}/absent?cas=1", None),
    ("DELETE", "/v1/kv/{root}/new", None),
    ("DELETE", "/v1/kv/{root}/new?recurse&cas=1", None),
    ("PUT", "/v1/kv/{root}/lock?acquire={session}", b"held"),
    ("GET", "/v1/kv/{root}/lock", None),
    ("PUT", "/v1/kv/{root}/lock?acquire={other}", b"x"),
    ("PUT", "/v1/kv/{root}/lock?release={other}", b"x"),
    ("PUT", "/v1/kv/{root}/lock?release={session}", b"free"),
    ("PUT", "/v1/kv/{root}/lock?acquire={nobody}", b"x"),
    ("PUT", "/v1/kv/{root}/lock?acquire=", b"x"),
    ("PUT", "/v1/txn", []),
    ("PUT", "/v1/txn", [{"KV": {"Verb": "get", "Key": "{root}/a"}}]),
    ("PUT", "/v1/txn", [{"KV": {"Verb": "get", "Key": "{root}/absent"}}]),
    ("PUT", "/v1/txn", [{"KV": {"Verb": "bogus", "Key": "{root}/a"}}]),
    (
        "PUT",
        "/v1/txn",
        [
            {"KV": {"Verb": "set", "Key": "{root}/t", "Value": "eA=="}},
            {"KV": {"Verb": "get-tree", "Key": "{root}/t"}},
            {"KV": {"Verb": "lock", "Key": "{root}/l", "Value": None, "Session": "{session}"}},
            {"KV": {"Verb": "check-session", "Key": "{root}/l", "Session": "{session}"}},
            {"KV": {"Verb": "delete", "Key": "{root}/t"}},
        ],
    ),
    (
        "PUT",
        "/v1/txn",
        [
            {"KV": {"Verb": "check-session", "Key": "{root}/l", "Session": "{other}"}},
            {"KV": {"Verb": "lock", "Key": "{root}/l", "Session": "{nobody}"}},
            {"KV": {"Verb": "unlock", "Key": "{root}/l"}},
            {"KV": {"Verb": "cas", "Key": "{root}/l", "Index": 1}},
        ],
    ),
    ("PUT", "/v1/txn", [{"KV": {"Verb": "set", "Key": ""}}]),
    ("PUT", "/v1/txn", [{"KV": {"Verb": "set", "Key": "{root}/x"}}] * 65),
    ("PUT", "/v1/session/renew/{session}", None),
    ("PUT", "/v1/session/renew/{nobody}", None),
    ("GET", "/v1/session/info/{session}", None),
    ("GET", "/v1/session/info/{nobody}", None),
    ("GET", "/v1/session/node/elsewhere", None),
    ("PUT", "/v1/session/destroy/{nobody}", None),
    ("PUT", "/v1/session/destroy/{session}", None),
    ("GET", "/v1/kv/{root}/l", None),
    ("PUT", "/v1/agent/service/register", {"ID": "x"}),
    ("PUT", "/v1/agent/service/register", {"Name": "{root}", "Check": {"TTL": "30s"}}),
    ("PUT", "/v1/agent/check/pass/service:{root}?note=fine", None),
    ("PUT", "/v1/agent/check/update/service:{root}", {"Status": "bogus"}),
    ("PUT", "/v1/agent/check/pass/nothing", None),
    ("PUT", "/v1/agent/check/register", {"TTL": "3s"}),
    ("PUT", "/v1/agent/service/deregister/{root}", None),
]


async def test_plain_requests_are_answered_as_by_consul(
    address: str, http: aiohttp.ClientSession, consul: ConsulServer, root: str
) -> None:
    """Status, content type, kinds of headers and body are the same, except for indexes."""
    here, there = ({"root": root, "nobody": "00000000-0000-0000-0000-000000000000"} for _ in range(2))
    for names, place in ((here, address), (there, consul.address)):
        for name in ("session", "other"):
            body = json.dumps({"Name": name, "TTL": "60s", "LockDelay": "0s"})
            async with http.put(f"http://{place}/v1/session/create", data=body) as response:
                names[name] = (await response.json())["ID"]
    for method, path, body in SAME:
        ours = await _ask(http, address, method, path, body, here)
        theirs = await _ask(http, consul.address, method, path, body, there)
        assert ours == theirs, (method, path)


async def _ask(
    http: aiohttp.ClientSession, place: str, method: str, path: str, body: Any, names: dict[str, str]
) -> tuple[int, str, list[str], Any]:
    """Send one request. Return its answer without everything that may differ."""
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    for name, value in names.items():
        path = path.replace(f"{{{name}}}", value)
        data = data.replace(f"{{{name}}}", value) if isinstance(data, str) else data
    async with http.request(method, f"http://{place}{path}", data=data) as response:
        text = (await response.text(errors="replace")).strip()
        headers = sorted(name.lower() for name in response.headers if name.startswith("X-Consul"))
        content_type = response.headers.get("Content-Type", "")
    for name, value in names.items():
        text = text.replace(value, f"<{name}>")
    text = re.sub(r'("(?:Create|Modify)Index": ?)\d+', r"\1N", text)
    answer = json.loads(re.sub(r": ?N\b", ': "N"', text)) if content_type == "application/json" else text
    if isinstance(answer, str):
        answer = re.sub(r"Conflicting flags: .*", "Conflicting flags", answer)
    return response.status, content_type, headers, answer


class TestTokens:
    @pytest.mark.parametrize(
        ("headers", "query", "status", "text"),
        [
            ({}, "", 403, "Permission denied"),
            ({"X-Consul-Token": "wrong"}, "", 403, "ACL not found"),
            ({"X-Consul-Token": "\u00fc"}, "", 403, "ACL not found"),
            ({"X-Consul-Token": TOKEN}, "", 404, ""),
            ({"Authorization": f"Bearer {TOKEN}"}, "", 404, ""),
            ({}, f"?token={TOKEN}", 404, ""),
        ],
    )
    async def test_a_token_is_required_in_any_of_consuls_ways(
        self,
        embedded: EmbeddedStore,
        http: aiohttp.ClientSession,
        headers: dict[str, str],
        query: str,
        status: int,
        text: str,
    ) -> None:
        """Without the token only the liveness of the server is visible."""
        async with serve_consul_api(embedded, token=TOKEN) as address:
            async with http.get(f"http://{address}/v1/kv/a{query}", headers=headers) as response:
                assert (response.status, await response.text()) == (status, text)
            async with http.get(f"http://{address}/v1/status/leader") as response:
                assert response.status == 200

    async def test_our_client_says_what_to_do(self, embedded: EmbeddedStore) -> None:
        """ConsulStore without the token is denied, and works with it."""
        async with serve_consul_api(embedded, token=TOKEN) as address:
            async with opened(ConsulSettings.from_env(address, environ={})) as store:
                with pytest.raises(Denied, match="CONSUL_HTTP_TOKEN"):
                    await store.put("a", b"")
            async with opened(ConsulSettings.from_env(address, environ={"CONSUL_HTTP_TOKEN": TOKEN})) as store:
                await store.put("a", b"")
        assert await embedded.keys("") == ["a"]


class TestBlockingQueries:
    async def test_a_key_is_not_woken_by_its_siblings(self, embedded: EmbeddedStore, api: Api) -> None:
        """A blocking query for `a` sleeps through changes of `ab` and `a/b`."""
        await embedded.put("a", b"1")
        index = embedded.state.index
        query = asyncio.create_task(api.get(f"/v1/kv/a?raw&index={index}&wait=30s"))
        await until(lambda: embedded.watcher_count == 1)
        await embedded.put("ab", b"")
        await embedded.put("a/b", b"")
        await asyncio.sleep(0.05)
        assert not query.done()
        await embedded.put("a", b"2")
        async with asyncio.timeout(20):
            assert await query == "2"

    async def test_a_client_that_goes_away_leaves_no_watch(self, embedded: EmbeddedStore, api: Api) -> None:
        """Its query ends with its connection, not with its wait."""
        await embedded.put("a", b"1")
        url = f"/v1/kv/?recurse&index={embedded.state.index}&wait=10m"
        query = asyncio.create_task(api.get(url))
        await until(lambda: embedded.watcher_count == 1)
        query.cancel()
        await until(lambda: embedded.watcher_count == 0)

    async def test_stopping_answers_what_waits(self, embedded: EmbeddedStore, http: aiohttp.ClientSession) -> None:
        """An orderly stop does not wait for queries that would block for minutes."""
        await embedded.put("a", b"1")
        async with asyncio.timeout(20), serve_consul_api(embedded) as address:
            url = f"/v1/kv/a?raw&index={embedded.state.index}&wait=10m"
            query = asyncio.create_task(Api(http, address).get(url))
            await until(lambda: embedded.watcher_count == 1)
        assert await query == "1"

    async def test_sessions_can_be_watched(self, embedded: EmbeddedStore, api: Api) -> None:
        """A blocking query on the list of sessions wakes when one is opened or ends, not for keys."""
        session = await embedded.create_session(SessionSpec("s"))
        url = f"/v1/session/list?index={embedded.state.sessions_changed}&wait=30s"
        query = asyncio.create_task(api.get(url))
        await asyncio.sleep(0.05)
        await embedded.put("a", b"")
        await asyncio.sleep(0.05)
        assert not query.done()
        await embedded.destroy_session(session.id)
        async with asyncio.timeout(20):
            assert await query == "[]"


class TestChecks:
    async def test_a_lapsed_check_ends_its_sessions(self, embedded: EmbeddedStore, api: Api) -> None:
        """A check that does not pass within its TTL is critical and its session ended; passing it later does not
        restore the session."""
        session = await api.bound_session("c1", ttl="1s")
        other = await api.bound_session("c2", ttl="60s")
        await embedded.txn([ops.lock("k", b"", session)])
        listing = await embedded.watch("k", embedded.state.index, 10)
        assert listing.entries[0].session is None
        assert list(embedded.state.sessions) == [other]
        checks = json.loads(await api.get("/v1/agent/checks"))
        assert [checks[name]["Status"] for name in ("c1", "c2")] == ["critical", "passing"]
        await api.put("/v1/agent/check/pass/c1")
        assert list(embedded.state.sessions) == [other]
        refusal = await api.put("/v1/session/create", {"Checks": ["nothing"]})
        assert refusal == "Missing check 'nothing' registration"

    @pytest.mark.parametrize("end", ["check/fail/c1", "check/deregister/c1", "service/deregister/s-c1"])
    async def test_failing_or_removing_a_check_ends_its_sessions(
        self, embedded: EmbeddedStore, api: Api, end: str
    ) -> None:
        """A session lives only as long as all of its checks exist and are not critical."""
        await api.bound_session("c1", ttl="60s")
        await api.put("/v1/agent/check/warn/c1")
        assert len(embedded.state.sessions) == 1
        await api.put(f"/v1/agent/{end}")
        assert not embedded.state.sessions

    async def test_passing_keeps_the_session(self, embedded: EmbeddedStore, api: Api) -> None:
        """A check that is passed within its TTL stays passing over many TTLs."""
        session = await api.bound_session("c1", ttl="1.5s")
        for _ in range(20):
            await asyncio.sleep(0.1)
            await api.put("/v1/agent/check/pass/c1")
        assert list(embedded.state.sessions) == [session]

    async def test_holders_keep_their_sessions_across_a_restart(self, tmp_path: Path) -> None:
        """A holder in another process that goes on renewing does not notice that the store was restarted."""
        path = tmp_path / "store.db"
        embedded = EmbeddedStore(path)
        async with serve_consul_api(embedded) as address:
            port = int(address.rpartition(":")[2])
            holder = ConsulStore(ConsulSettings.from_env(address, environ={}))
            session = await holder.create_session(SessionSpec("agent", check_ttl=2))
            await holder.txn([ops.lock("k", b"", session.id)])
        await embedded.close()

        embedded = EmbeddedStore(path)
        async with serve_consul_api(embedded, port=port):
            await holder.renew_session(session.id)
            entry = require(await holder.get("k"))
            assert entry.session == session.id
            freed = await embedded.watch("k", embedded.state.index, 20)
            assert freed.entries[0].session is None, "its check is supervised as before"
        await holder.close()
        await embedded.close()
