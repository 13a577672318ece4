"""Which store a URL, or the environment, names."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from store.consul.client import ConsulSettings
from store.consul.store import ConsulStore
from store.embedded.sqlite import AlreadyOpen
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Invalid, Store, Unavailable
from store.open import (
    ENDPOINT_FILE,
    PORT_FILE,
    STORE_FILE,
    TOKEN_FILE,
    Endpoint,
    dev_directory,
    former_port,
    open_store,
    read_endpoint,
    remove_endpoint,
    store_token,
    write_endpoint,
)

OWNER = """
import asyncio, os, sys
from pathlib import Path
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.open import Endpoint, store_token, write_endpoint

async def main():
    directory = Path(sys.argv[1])
    token = store_token(directory) if sys.argv[2] else None
    async with serve_consul_api(EmbeddedStore(directory / "store.db"), token=token) as address:
        write_endpoint(directory, Endpoint(f"consul://{address}", os.getpid()))
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def settings_of(store: Store) -> ConsulSettings:
    """How a Consul store would connect."""
    await store.close()
    assert isinstance(store, ConsulStore)
    return store.settings


async def test_each_form_opens_its_store(tmp_path: Path) -> None:
    """consul://, consuls://, embedded: and memory: each name one kind of store."""
    assert (await settings_of(open_store("consul://there:8501", environ={}))).url == "http://there:8501"
    assert (await settings_of(open_store("consuls://there:8501", environ={}))).url == "https://there:8501"
    memory = open_store("memory:", environ={})
    assert isinstance(memory, EmbeddedStore)
    directory = open_store(f"embedded:{tmp_path}/state", environ={})
    assert isinstance(directory, EmbeddedStore)
    await directory.put("a", b"")
    await directory.close()
    assert (tmp_path / "state" / STORE_FILE).is_file()


async def test_without_a_url_the_environment_decides(tmp_path: Path) -> None:
    """RCFARM_STORE comes before CONSUL_HTTP_ADDR, and that before the local `rcfarm dev`."""
    environ = {"XDG_STATE_HOME": str(tmp_path), "HOME": "/nowhere"}
    directory = dev_directory(environ)
    directory.mkdir(parents=True)
    write_endpoint(directory, Endpoint("consul://127.0.0.1:1111", os.getpid()))
    assert (await settings_of(open_store(environ=environ))).url == "http://127.0.0.1:1111"
    environ["CONSUL_HTTP_ADDR"] = "127.0.0.1:2222"
    assert (await settings_of(open_store(environ=environ))).url == "http://127.0.0.1:2222"
    environ["RCFARM_STORE"] = "consul://127.0.0.1:3333"
    assert (await settings_of(open_store(environ=environ))).url == "http://127.0.0.1:3333"
    assert (await settings_of(open_store("consul://127.0.0.1:4444", environ=environ))).url == "http://127.0.0.1:4444"


@pytest.mark.parametrize("url", ["memory", "embedded:", "redis://x", "127.0.0.1:8500", "memory:x", "consul://a/b"])
async def test_what_is_no_store_is_refused_with_the_forms_there_are(url: str) -> None:
    """A URL that makes no sense is named, with what would make sense."""
    with pytest.raises(Invalid, match=r"expected|name the directory") as refused:
        open_store(url, environ={})
    assert url in str(refused.value)


async def test_with_nothing_running_the_message_says_what_to_do(tmp_path: Path) -> None:
    """No URL, no environment, no `rcfarm dev`, or one that is gone: start it or name a store."""
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    with pytest.raises(Unavailable, match=r"`rcfarm dev` does not run.*--store"):
        open_store(environ=environ)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dev_directory(environ).mkdir(parents=True)
    write_endpoint(dev_directory(environ), Endpoint("consul://127.0.0.1:1", gone.pid))
    with pytest.raises(Unavailable, match=r"`rcfarm dev` does not run"):
        open_store(environ=environ)
    (dev_directory(environ) / ENDPOINT_FILE).write_text("{")
    with pytest.raises(Unavailable, match=r"endpoint\.json can't be read"):
        open_store(environ=environ)


@pytest.mark.parametrize("token", ["", "a-secret"])
async def test_a_directory_in_use_is_reached_through_its_owner(tmp_path: Path, token: str) -> None:
    """`embedded:DIR` works while another process has DIR open and serves it; its token is found there, too."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), token], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    environ = {"CONSUL_HTTP_ADDR": "127.0.0.1:1", "CONSUL_HTTP_SSL": "true"}
    try:
        store = open_store(f"embedded:{tmp_path}", environ=environ)
        assert isinstance(store, ConsulStore)
        await store.put("a", b"through the owner")
        await store.close()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    store = open_store(f"embedded:{tmp_path}", environ=environ)
    entry = await store.get("a")
    await store.close()
    assert isinstance(store, EmbeddedStore)
    assert entry is not None
    assert entry.value == b"through the owner"


async def test_a_directory_in_use_and_not_served_names_its_owner(tmp_path: Path) -> None:
    """Without an endpoint, or with one that an earlier owner left, only the owner's pid is known."""
    store = EmbeddedStore(tmp_path / STORE_FILE)
    with pytest.raises(AlreadyOpen, match=str(os.getpid())):
        open_store(f"embedded:{tmp_path}", environ={})
    write_endpoint(tmp_path, Endpoint("consul://127.0.0.1:1", os.getpid() + 1))
    with pytest.raises(AlreadyOpen, match=str(os.getpid())):
        open_store(f"embedded:{tmp_path}", environ={})
    await store.close()


async def test_the_endpoint_file_is_private_and_replaced_at_once(tmp_path: Path) -> None:
    """Only the user of the store can read where it is served."""
    write_endpoint(tmp_path, Endpoint("consul://a:1", 1))
    write_endpoint(tmp_path, Endpoint("consul://b:2", 2))
    assert (tmp_path / ENDPOINT_FILE).stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / ENDPOINT_FILE).read_text()) == {"url": "consul://b:2", "pid": 2}
    assert sorted(each.name for each in tmp_path.iterdir()) == [ENDPOINT_FILE, PORT_FILE]
    remove_endpoint(tmp_path)
    remove_endpoint(tmp_path)
    assert read_endpoint(tmp_path) is None


def test_each_store_has_a_token_of_its_own_that_stays(tmp_path: Path) -> None:
    """The token is random, private, and the same after a restart; an empty file is refused with what to do."""
    (tmp_path / "other").mkdir()
    token = store_token(tmp_path)
    assert len(token) >= 32
    assert store_token(tmp_path) == token != store_token(tmp_path / "other")
    (tmp_path / TOKEN_FILE).chmod(0o644)
    assert store_token(tmp_path) == token
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / TOKEN_FILE).write_text("\n")
    with pytest.raises(Unavailable, match="remove it"):
        store_token(tmp_path)


async def test_the_address_of_the_local_dev_needs_no_token_either(tmp_path: Path) -> None:
    """A program that is given the address of `rcfarm dev` finds its token; one for another address does not send it."""
    environ = {"XDG_STATE_HOME": str(tmp_path), "HOME": "/nowhere"}
    directory = dev_directory(environ)
    directory.mkdir(parents=True)
    token = store_token(directory)
    write_endpoint(directory, Endpoint("consul://127.0.0.1:1111", os.getpid()))
    for url, expected in (("consul://127.0.0.1:1111", token), ("consul://127.0.0.1:1112", None)):
        assert (await settings_of(open_store(url, environ=environ))).token == expected
    environ |= {"CONSUL_HTTP_ADDR": "127.0.0.1:1111", "CONSUL_HTTP_TOKEN": "mine"}
    assert (await settings_of(open_store(environ=environ))).token == "mine"


async def test_connections_can_be_limited() -> None:
    """`max_connections` bounds a store in another process; some of them always stay free for calls."""
    settings = await settings_of(open_store("consul://127.0.0.1:1", environ={}, max_connections=8))
    assert settings.max_connections == 8
    assert 0 < settings.max_watches < 8


async def test_the_port_outlives_the_endpoint(tmp_path: Path) -> None:
    """Where the store was served last is known after an orderly stop, too; what can't be read counts as unknown."""
    assert former_port(tmp_path) == 0
    write_endpoint(tmp_path, Endpoint("consul://127.0.0.1:4711", 1))
    remove_endpoint(tmp_path)
    assert former_port(tmp_path) == 4711
    (tmp_path / PORT_FILE).write_text("junk")
    assert former_port(tmp_path) == 0
    (tmp_path / PORT_FILE).write_text("99999")
    assert former_port(tmp_path) == 0


async def test_a_user_without_a_home_reaches_its_consul(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dynamic user of systemd's has no home and no entry in the user database: a named store needs neither."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    await settings_of(open_store("consul://127.0.0.1:1", environ={}))
    with pytest.raises(Unavailable, match=r"looked in /\.local/state/rcfarm/dev"):
        open_store(environ={})
