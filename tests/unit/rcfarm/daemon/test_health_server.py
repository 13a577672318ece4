"""The daemon's listener: its answers, and its access control."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest

from rcfarm.config.settings import BadSettings, WebSettings
from rcfarm.daemon.health import Condition, Health, StallDetector
from rcfarm.daemon.health_server import serving, web_app
from rcfarm.daemon.listener import Address, listener, parse_address
from rcfarm.telemetry.prometheus import new_registry
from tests.support.raw_http import exchange, request, status_of

LOOPBACK = Address("127.0.0.1", 0)


class State:
    """The state that the endpoints report, set by a test."""

    def __init__(self) -> None:
        self.stalled = ""
        self.conditions = [Condition("running", True), Condition("session", True)]

    def app(self, token: str = "") -> aiohttp.web.Application:
        health = Health(lambda: self.stalled, lambda: self.conditions)
        return web_app(health, new_registry("1.2.3"), token=token)


async def fetch(address: str, path: str, token: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}", headers=headers) as answer:
        return answer.status, await answer.text()


async def test_readiness_names_each_failing_condition() -> None:
    """The status is 200 while all hold, else 503; the text lists failing conditions with reasons, and the others."""
    state = State()
    async with serving(state.app(), LOOPBACK) as address:
        assert await fetch(address, "/readyz") == (200, "[+] running\n[+] session\nready\n")
        state.conditions[1] = Condition("session", False, "Consul refuses connections")
        status, text = await fetch(address, "/readyz")

    assert status == 503
    assert text.splitlines() == ["[+] running", "[-] session: Consul refuses connections", "not ready"]


async def test_liveness_fails_when_nothing_moves() -> None:
    """A daemon that is not ready is alive all the same; one that stands still is not, and says why."""
    state = State()
    state.conditions[1] = Condition("session", False, "Consul refuses connections")
    async with serving(state.app(), LOOPBACK) as address:
        assert await fetch(address, "/livez") == (200, "ok\n")
        state.stalled = "farm: no RC was finished for 60 s"
        assert await fetch(address, "/livez") == (503, "stalled: farm: no RC was finished for 60 s\n")


async def test_metrics_are_prometheus_text() -> None:
    """A scrape gets the registry in Prometheus's format."""
    async with serving(State().app(), LOOPBACK) as address:
        status, text = await fetch(address, "/metrics")

    assert status == 200
    assert 'rcfarm_build_info{version="1.2.3"} 1.0' in text


async def test_without_the_token_only_status_codes_are_shown() -> None:
    """Probes work without it; reasons and metrics don't."""
    state = State()
    state.stalled = "a secret reason"
    state.conditions[1] = Condition("session", False, "a secret reason")
    async with serving(state.app(token="hunter2"), LOOPBACK) as address:
        assert await fetch(address, "/livez") == (503, "stalled\n")
        assert await fetch(address, "/readyz") == (503, "not ready\n")
        assert (await fetch(address, "/metrics"))[0] == 401
        assert (await fetch(address, "/metrics", "wrong"))[0] == 401

        assert (await fetch(address, "/metrics", "hunter2"))[0] == 200
        assert "a secret reason" in (await fetch(address, "/readyz", "hunter2"))[1]
        assert "a secret reason" in (await fetch(address, "/livez", "hunter2"))[1]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", Address("127.0.0.1", 9701)),
        ("off", None),
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        ("[::1]:9000", Address("::1", 9000)),
        ("farm.example:0", Address("farm.example", 0)),
    ],
)
def test_where_to_listen(text: str, address: Address | None) -> None:
    """Loopback and the role's port by default; IPv6 in brackets; `off` for none."""
    assert parse_address(text, 9701) == address


@pytest.mark.parametrize("text", ["9701", ":9701", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "http://a:1", "a:b"])
def test_a_listener_that_makes_no_sense_is_refused(text: str) -> None:
    """The message quotes it and shows the forms."""
    with pytest.raises(BadSettings, match=r"web\.listen: .*HOST:PORT"):
        parse_address(text, 9701)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "farm.example"])
def test_beyond_loopback_a_token_is_required(host: str) -> None:
    """Without it the start is refused, with what to set."""
    with pytest.raises(BadSettings, match=r"a token is required: set web\.token_file"):
        listener(WebSettings(listen=f"{host}:9701"), 9701)

    assert listener(WebSettings(listen=f"{host}:9701", token="x"), 9701)[1] == "x"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_on_loopback_no_token_is_needed(host: str) -> None:
    """One's own machine may read."""
    address, token = listener(WebSettings(listen=f"{host}:9701"), 9701)
    assert address is not None
    assert address.is_loopback
    assert token == ""


def test_the_token_may_come_from_a_file(tmp_path: Path) -> None:
    """Its first and last white space is not part of it; a missing or empty file is an error, and so is having both."""
    path = tmp_path / "token"
    path.write_text("hunter2\n")
    assert listener(WebSettings(listen="0.0.0.0:1", token_file=str(path)), 9701)[1] == "hunter2"

    with pytest.raises(BadSettings, match="both set"):
        listener(WebSettings(token="a", token_file=str(path)), 9701)
    path.write_text("\n")
    with pytest.raises(BadSettings, match="holds no token"):
        listener(WebSettings(token_file=str(path)), 9701)
    with pytest.raises(BadSettings, match="can't be read"):
        listener(WebSettings(token_file=str(tmp_path / "none")), 9701)


async def test_a_port_in_use_is_a_clear_error() -> None:
    """The message names the setting, the address and the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadSettings, match=rf"web\.listen: can't listen on 127\.0\.0\.1:{port}: .*in use"):
            async with serving(State().app(), Address("127.0.0.1", port)):
                pass


async def test_a_token_of_any_bytes_is_only_wrong() -> None:
    """Bytes that are no text, sent as a token, are a wrong token and not an error."""
    async with serving(State().app(token="hunter2"), LOOPBACK) as address:
        for path, status in (("/metrics", 401), ("/readyz", 200), ("/livez", 200)):
            answer = await exchange(address, request(path, "Authorization: Bearer \udcff\udcfe"))
            assert status_of(answer) == status


def test_a_counter_that_stands_still_while_there_is_work_is_a_stall() -> None:
    """Only silence with work waiting, beyond the limit, is a stall; being idle is none, however long."""
    now = 0.0
    detector = StallDetector(60.0, lambda: now)

    assert detector.stalled_for(0, busy=True) == 0.0
    now = 60.0
    assert detector.stalled_for(0, busy=True) == 0.0
    now = 61.0
    assert detector.stalled_for(0, busy=True) == 61.0
    assert detector.stalled_for(1, busy=True) == 0.0
    now = 1000.0
    assert detector.stalled_for(1, busy=False) == 0.0
    now = 1059.0
    assert detector.stalled_for(1, busy=True) == 0.0
    now = 1061.0
    assert detector.stalled_for(1, busy=True) == 61.0
