"""The API server's address and our credentials, and how changes of them are followed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from store.kube.api.errors import NoConfig, Unauthorized, Unreachable
from store.kube.api.objects import PODS
from store.kube.client.client import KubeClient
from store.kube.client.credentials import Access, Kubeconfig, ServiceAccount, current_namespace, find_access
from store.kube.client.transport import CHECK_EVERY, REREAD_AFTER_REFUSAL, Credentials
from tests.support.kube.certificates import Authority
from tests.support.kube.faults.odd_server import serving, status_answer
from tests.support.waiting import Clock

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


def write_kubeconfig(path: Path, server: str = "http://10.0.0.1:8080", **user: Any) -> Path:
    """A kubeconfig whose context, cluster and user have the name of the file."""
    name = path.name
    content = {
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "clusters": [{"name": name, "cluster": {"server": server, **user.pop("cluster", {})}}],
        "users": [{"name": name, "user": user}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def write_plugin(directory: Path, status: dict[str, Any]) -> dict[str, Any]:
    """An exec plugin that answers `status`, with the number of its calls in the token, as a kubeconfig names it."""
    program = directory / "plugin"
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    (directory / "answer.json").write_text(json.dumps(answer))
    program.write_text(f"#!/bin/sh\ncd {directory}\necho >> calls\nn=$(wc -l < calls)\nsed s/COUNT/$n/ answer.json\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"apiVersion": answer["apiVersion"], "command": str(program)}


async def read(kubeconfig: Path, **options: Any) -> Access:
    return await find_access(str(kubeconfig), environ={}, **options).read(fresh=True)


def service_account(directory: Path, token: str = "one", ca: str | None = None) -> Path:
    (directory / "token").write_text(token)
    (directory / "ca.crt").write_text(ca if ca is not None else "")
    return directory


async def test_nothing_is_configured(tmp_path: Path) -> None:
    """The error names every way to configure a server (the barrier exits with 1 on it)."""
    with pytest.raises(NoConfig, match=r"name a kubeconfig file, set KUBECONFIG, put one at ~/.kube/config, or run in"):
        find_access(environ={"HOME": str(tmp_path)})
    with pytest.raises(NoConfig, match="the context x needs a kubeconfig file"):
        find_access(context="x", environ={"HOME": str(tmp_path), **IN_CLUSTER})


async def test_a_kubeconfig_that_is_named_and_missing(tmp_path: Path) -> None:
    """A missing kubeconfig is an error, never silently replaced by another source."""
    environ = {"KUBECONFIG": str(tmp_path / "no"), **IN_CLUSTER}
    with pytest.raises(NoConfig, match=r"there is no kubeconfig file .*/no, which KUBECONFIG names"):
        find_access(environ=environ, server="http://127.0.0.1:1")
    with pytest.raises(NoConfig, match=r"there is no kubeconfig file /none$"):
        find_access("/none", environ={})


async def test_the_file_in_the_home_directory(tmp_path: Path) -> None:
    """`~/.kube/config` counts without being named, before the pod's own service account."""
    (tmp_path / ".kube").mkdir()
    write_kubeconfig(tmp_path / ".kube" / "config", token="t")
    source = find_access(environ={"HOME": str(tmp_path), **IN_CLUSTER})
    assert await source.read(fresh=True) == Access("http://10.0.0.1:8080", "Bearer t")


@pytest.mark.parametrize("place", ["home", "server", "pod", "nowhere"])
async def test_a_daemon_passes_over_a_kubeconfig_variable_that_names_no_file(place: str, tmp_path: Path) -> None:
    """As the Go programs do; a file that the settings name must exist all the same."""
    environ = {"KUBECONFIG": str(tmp_path / "no"), "HOME": str(tmp_path)}
    if place == "home":
        (tmp_path / ".kube").mkdir()
        write_kubeconfig(tmp_path / ".kube" / "config", server="http://10.0.0.1:8080", token="t")
    if place == "pod":
        environ |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    server = "http://10.0.0.1:8080" if place == "server" else None
    if place == "nowhere":
        with pytest.raises(NoConfig, match="no Kubernetes API server is configured"):
            find_access(environ=environ, is_daemon=True)
    else:
        source = find_access(server=server, environ=environ, is_daemon=True)
        assert isinstance(source, ServiceAccount) or (await source.read(fresh=True)).server == "http://10.0.0.1:8080"
    assert current_namespace(environ=environ, is_daemon=True, service_account=tmp_path) == "default"
    with pytest.raises(NoConfig, match="there is no kubeconfig file"):
        find_access(str(tmp_path / "no"), environ=environ, is_daemon=True)


async def test_a_list_of_kubeconfigs_is_merged(tmp_path: Path) -> None:
    """As kubectl does: missing ones are skipped, contexts of all count, the first current context wins. `server` keeps
    the credentials and changes where they go."""
    one, two = (write_kubeconfig(tmp_path / name, token=name, server=f"http://{name}:80") for name in ("one", "two"))
    environ = {"KUBECONFIG": f"{one}:{tmp_path / 'missing'}:{two}"}
    assert (await find_access(environ=environ).read(fresh=True)).server == "http://one:80"
    assert await find_access(environ=environ, context="two").read(fresh=True) == Access("http://two:80", "Bearer two")
    assert await read(one, server="http://127.0.0.1:9/prefix/") == Access("http://127.0.0.1:9/prefix", "Bearer one")


@pytest.mark.parametrize("server", ["http://127.0.0.1:8080", "127.0.0.1:8080"])
async def test_an_address_alone(server: str, tmp_path: Path) -> None:
    """A server address alone is used without credentials, even in a pod that has some."""
    source = find_access(server=server, environ={"HOME": str(tmp_path), **IN_CLUSTER})
    assert await source.read(fresh=True) == Access("http://127.0.0.1:8080")


@pytest.mark.parametrize("server", ["ftp://127.0.0.1", "https://", ":80"])
async def test_an_address_that_is_none(server: str, tmp_path: Path) -> None:
    """The error shows what was given and what to give."""
    with pytest.raises(NoConfig, match="write https://HOST:PORT"):
        find_access(server=server, environ={"HOME": str(tmp_path)})


@pytest.mark.parametrize(
    "user", [{"token": "t"}, {"username": "u", "password": "p"}, {}, {"tokenFile": "token"}], ids=lambda user: str(user)
)
async def test_kinds_of_users(user: dict[str, Any], tmp_path: Path) -> None:
    """Tokens, token files relative to the kubeconfig (with a line's end in them), passwords, and no credentials."""
    (tmp_path / "token").write_text("from-file\n")
    expected = {"token": "Bearer t", "username": f"Basic {base64.b64encode(b'u:p').decode()}"}
    expected["tokenFile"] = "Bearer from-file"
    path = write_kubeconfig(tmp_path / "config", **user)
    assert (await read(path)).authorization == expected.get(next(iter(user), ""), "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "does not have the form of a kubeconfig"),
        ("a: [", "expected the node content"),
        ("current-context: x\ncontexts: []\nclusters: []\n", "Expected object with name x in .*contexts"),
    ],
)
async def test_kubeconfigs_that_make_no_sense(content: str, message: str, tmp_path: Path) -> None:
    """The error names the file, whatever is wrong with it."""
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(NoConfig, match=message) as caught:
        await read(path)
    assert str(path) in str(caught.value)


async def test_errors_keep_secrets(tmp_path: Path) -> None:
    """A broken entry is not quoted with the token in it, and an `Access` does not show what it carries."""
    path = write_kubeconfig(tmp_path / "config")
    content = yaml.safe_load(path.read_text())
    content["users"] = [{"name": "config", "user": {"token": "s3cret", "exec": {"env": [{"value": "s3cret"}]}}}]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(NoConfig) as caught:
        await read(path)
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(Access("http://h", "Bearer s3cret", proxy="http://u:s3cret@h"))


async def test_a_token_file_is_followed(tmp_path: Path, clock: Clock) -> None:
    """A new token is used within the interval of checks, and not looked for between them. A file that is missing for a
    moment breaks no call; the next one is taken."""
    token = tmp_path / "token"
    token.write_text("one")
    path = write_kubeconfig(tmp_path / "config", tokenFile="token")
    credentials = await Credentials.open(Kubeconfig([path]), clock)
    token.write_text("second")
    assert (await credentials.current()).authorization == "Bearer one"
    for change, used in ((None, "second"), (path.unlink, "second"), (lambda: write_kubeconfig(path, token="3"), "3")):
        if change is not None:
            change()
        clock.now += CHECK_EVERY
        assert (await credentials.current()).authorization == f"Bearer {used}"


async def test_a_plugin_runs_when_it_must(tmp_path: Path, clock: Clock) -> None:
    """An exec plugin runs once, not for every call; again when its token was refused, but not for every refusal."""
    plugin = write_plugin(tmp_path, {"token": "t-COUNT", "expirationTimestamp": "2099-01-01T00:00:00Z"})
    credentials = await Credentials.open(Kubeconfig([write_kubeconfig(tmp_path / "config", exec=plugin)]), clock)
    clock.now += CHECK_EVERY
    first = await credentials.current()
    assert first.authorization == "Bearer t-1"
    assert await credentials.renewed(first)
    second = await credentials.current()
    assert second.authorization == "Bearer t-2"
    assert await credentials.renewed(first)  # another call was refused with the old one
    assert not await credentials.renewed(second)
    clock.now += REREAD_AFTER_REFUSAL
    assert await credentials.renewed(second)
    assert (await credentials.current()).authorization == "Bearer t-3"


async def test_a_plugins_token_is_renewed_before_it_ends(tmp_path: Path, clock: Clock) -> None:
    """The plugin said when its token ends; that time is (nearly) there."""
    plugin = write_plugin(tmp_path, {"token": "t-COUNT", "expirationTimestamp": "2001-01-01T00:00:00Z"})
    credentials = await Credentials.open(Kubeconfig([write_kubeconfig(tmp_path / "config", exec=plugin)]), clock)
    clock.now += CHECK_EVERY
    assert (await credentials.current()).authorization == "Bearer t-2"


async def test_calls_go_on_while_a_plugin_runs(tmp_path: Path, clock: Clock) -> None:
    """One call waits for the new token; concurrent calls are not blocked."""
    plugin = write_plugin(tmp_path, {"token": "t-COUNT", "expirationTimestamp": "2001-01-01T00:00:00Z"})
    credentials = await Credentials.open(Kubeconfig([write_kubeconfig(tmp_path / "config", exec=plugin)]), clock)
    os.mkfifo(tmp_path / "gate")
    program = tmp_path / "plugin"
    program.write_text(program.read_text().replace("echo >>", "cat gate; echo >>"))
    clock.now += CHECK_EVERY
    waiting = asyncio.create_task(credentials.current())
    await asyncio.sleep(0)
    assert (await credentials.current()).authorization == "Bearer t-1"
    await asyncio.to_thread((tmp_path / "gate").write_text, "")
    assert (await waiting).authorization == "Bearer t-2"


async def test_a_plugin_that_fails(tmp_path: Path) -> None:
    """The error quotes the plugin's message."""
    program = tmp_path / "plugin"
    program.write_text("#!/bin/sh\necho log in first >&2\nexit 3\n")
    program.chmod(0o755)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}
    with pytest.raises(NoConfig, match=r"process returned 3\. log in first"):
        await read(write_kubeconfig(tmp_path / "config", exec=plugin))


async def test_a_service_account(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    """In a pod: the address is in the environment, IPv6 in brackets; a renewed token is taken, and the TLS context,
    with its open connections, stays as long as the authority does."""
    service_account(tmp_path, ca=authority.own.certificate.read_text())
    environ = {**IN_CLUSTER, "KUBERNETES_SERVICE_HOST": "fd00::1"}
    credentials = await Credentials.open(ServiceAccount(environ, tmp_path), clock)
    before = await credentials.current()
    assert (before.server, before.authorization) == ("https://[fd00::1]:443", "Bearer one")
    service_account(tmp_path, "second\n", authority.own.certificate.read_text())
    clock.now += CHECK_EVERY
    after = await credentials.current()
    assert after.authorization == "Bearer second"
    assert after.tls is before.tls


@pytest.mark.parametrize(
    ("token", "ca", "message"),
    [(None, None, "automountServiceAccountToken"), ("", "", "is empty"), ("t", "no certificate", "certificates for")],
)
async def test_a_pod_without_a_usable_account(token: str | None, ca: str | None, message: str, tmp_path: Path) -> None:
    """The error names the file, or the field of the pod's spec that is missing."""
    if token is not None:
        service_account(tmp_path, token, ca)
    source = find_access(environ={"HOME": "/none", **IN_CLUSTER}, service_account=tmp_path)
    with pytest.raises(NoConfig, match=message):
        await source.read(fresh=True)


def test_the_namespace_of_a_context(tmp_path: Path) -> None:
    """That of the context, wherever among the files it is; without one, `default`."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(yaml.safe_dump({"current-context": "b", "contexts": [{"name": "a", "context": {"namespace": "x"}}]}))
    two.write_text(yaml.safe_dump({"current-context": "a", "contexts": [{"name": "b", "context": {"namespace": "y"}}]}))
    paths = f"{one}:{two}"
    assert current_namespace(paths, environ={}) == "y"
    assert current_namespace(paths, context="a", environ={}) == "x"
    assert current_namespace(str(two), environ={}) == "default"


def test_the_namespace_of_a_pod(tmp_path: Path) -> None:
    """The kubelet writes the namespace beside the token; outside of a pod there is none."""
    environ = {"HOME": str(tmp_path)}
    assert current_namespace(environ=environ, service_account=tmp_path) == "default"
    (tmp_path / "namespace").write_text("team\n")
    assert current_namespace(environ=environ, service_account=tmp_path) == "team"


async def test_a_refused_token_is_read_again_and_the_call_sent_again(tmp_path: Path) -> None:
    """A 401 in the middle of a rotation is not the caller's concern: the server processed nothing."""
    valid = "one"
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        if seen[-1] != f"Bearer {valid}":
            return status_answer(401, "Unauthorized")
        return web.json_response({"metadata": {"name": "a"}})

    async with serving(handler) as url:
        path = write_kubeconfig(tmp_path / "config", url, tokenFile="token")
        (tmp_path / "token").write_text(valid)
        async with await KubeClient.connect(str(path)) as client:
            await client.create(PODS, {"metadata": {"name": "a"}}, "ns")
            valid = "second"
            (tmp_path / "token").write_text(valid)
            await client.create(PODS, {"metadata": {"name": "a"}}, "ns")
            valid = "third"
            with pytest.raises(Unauthorized):
                await client.create(PODS, {"metadata": {"name": "a"}}, "ns")
    assert seen == ["Bearer one", "Bearer one", "Bearer second", "Bearer second"]


@asynccontextmanager
async def tls_server(authority: Authority) -> AsyncIterator[tuple[str, list[str]]]:
    """Its URL, and the users whose client certificates it saw; it refuses clients without one."""
    users: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        subject = request.transport.get_extra_info("peercert")["subject"]
        users.append(dict(part for (part,) in subject)["commonName"])
        return web.json_response({"metadata": {}})

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.own.certificate))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(*authority.issue("server"))
    async with serving(handler, context) as url:
        yield url, users


async def test_a_client_certificate_is_followed(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    """A renewed certificate is used by the next call after a check, on a new connection, without a restart."""
    async with tls_server(authority) as (url, users):
        first, second = (authority.issue(name, user=name) for name in ("alice", "bob"))
        (tmp_path / "crt").write_bytes(first.certificate.read_bytes())
        (tmp_path / "key").write_bytes(first.key.read_bytes())
        cluster = {"certificate-authority": str(authority.own.certificate)}
        user = {"client-certificate": "crt", "client-key": "key"}
        path = write_kubeconfig(tmp_path / "config", url, cluster=cluster, **user)
        credentials = await Credentials.open(Kubeconfig([path]), clock)
        async with KubeClient(credentials) as client:
            await client.get(PODS, "a", "ns")
            (tmp_path / "key").write_bytes(second.key.read_bytes())
            clock.now += CHECK_EVERY
            await client.get(PODS, "a", "ns")  # key and certificate do not fit together at this moment
            (tmp_path / "crt").write_bytes(second.certificate.read_bytes())
            clock.now += CHECK_EVERY
            await client.get(PODS, "a", "ns")
    assert users == ["alice", "alice", "bob"]


async def test_inline_certificates(tmp_path: Path, authority: Authority) -> None:
    """Certificates may be in the kubeconfig itself."""
    async with tls_server(authority) as (url, users):
        issued = authority.issue("carol", user="carol")
        encoded = {
            name: base64.b64encode(path.read_bytes()).decode()
            for name, path in {
                "client-certificate-data": issued.certificate,
                "client-key-data": issued.key,
                "certificate-authority-data": authority.own.certificate,
            }.items()
        }
        cluster = {"certificate-authority-data": encoded.pop("certificate-authority-data")}
        path = write_kubeconfig(tmp_path / "config", url, cluster=cluster, **encoded)
        async with await KubeClient.connect(str(path)) as client:
            await client.get(PODS, "a", "ns")
    assert users == ["carol"]


async def test_a_server_with_an_unknown_authority(tmp_path: Path, authority: Authority) -> None:
    """A certificate of another authority ends the call before anything is sent, unless the kubeconfig waives it."""
    stranger = Authority(tmp_path / "stranger")
    issued = authority.issue("dave", user="dave")
    user = {"client-certificate": str(issued.certificate), "client-key": str(issued.key)}
    async with tls_server(authority) as (url, users):
        trust = {"certificate-authority": str(stranger.own.certificate)}
        path = write_kubeconfig(tmp_path / "config", url, cluster=trust, **user)
        async with await KubeClient.connect(str(path)) as client:
            with pytest.raises(Unreachable, match=r"certificate verify failed.*not applied"):
                await client.create(PODS, {}, "ns")
        waived = {"insecure-skip-tls-verify": True}
        path = write_kubeconfig(tmp_path / "config", url, cluster=waived, **user)
        async with await KubeClient.connect(str(path)) as client:
            await client.get(PODS, "a", "ns")
    assert users == ["dave"]


async def test_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubeconfig's counts before the environment's, which names hosts to leave out."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    monkeypatch.setenv("NO_PROXY", "10.0.0.2")
    plain = write_kubeconfig(tmp_path / "config")
    assert (await read(plain)).proxy == "http://proxy:1"
    assert (await read(plain, server="http://10.0.0.2")).proxy is None
    named = write_kubeconfig(tmp_path / "named", cluster={"proxy-url": "http://other:2"})
    assert (await read(named)).proxy == "http://other:2"
