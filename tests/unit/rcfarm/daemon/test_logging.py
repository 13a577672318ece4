"""The contents and form of logs, and secrets, which are never logged."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import structlog

from rcfarm.daemon.logging import Style, configure, remove_from_events
from store.redaction import Redactor


@pytest.fixture
def stream() -> io.StringIO:
    """Return a stream to log to."""
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_object(stream: io.StringIO) -> None:
    """Time, level, event, module and every key of the caller stand in one line, in this order at its start."""
    configure("info", "json", stream=stream)
    structlog.get_logger("rcfarm.farm.farm").info("Claimed an RC", rc="web", owner="farm-a", token=17)

    (event,) = lines(stream)
    assert list(event)[:3] == ["timestamp", "level", "event"]
    assert event["timestamp"].endswith("Z")
    del event["timestamp"]
    assert event == {
        "level": "info", "event": "Claimed an RC", "logger": "rcfarm.farm.farm",
        "rc": "web", "owner": "farm-a", "token": 17,
    }  # fmt: skip


def test_events_below_the_level_are_dropped(stream: io.StringIO) -> None:
    """`warning` leaves out info and debug."""
    configure("warning", "json", stream=stream)
    log = structlog.get_logger()
    for method in (log.debug, log.info, log.warning, log.error):
        method("x")

    assert [event["level"] for event in lines(stream)] == ["warning", "error"]


def test_secrets_are_replaced(stream: io.StringIO) -> None:
    """Neither a credential under a known key, nor text under `token`, nor a local variable reaches the log."""
    configure("info", "json", stream=stream)

    def fail() -> None:
        local_secret = "hun" + "ter2"
        raise RuntimeError(f"no luck with {len(local_secret)} letters")

    try:
        fail()
    except RuntimeError:
        structlog.get_logger().exception("Denied", token="hunter2", authorization="Bearer hunter2", acl_token="hunter2")

    assert "hunter2" not in stream.getvalue()
    (event,) = lines(stream)
    assert event["token"] == event["acl_token"] == event["authorization"] == "[redacted]"
    assert "RuntimeError: no luck" in event["exception"]


def test_anything_can_be_a_value(stream: io.StringIO) -> None:
    """A value without a JSON form is logged as its text instead of failing the caller."""
    configure("info", "json", stream=stream)
    structlog.get_logger().info("x", error=ValueError("why"), names={"b"}, none=None)

    (event,) = lines(stream)
    assert (event["error"], event["names"], event["none"]) == ("why", ["b"], None)


def test_libraries_log_in_the_same_form(stream: io.StringIO) -> None:
    """The standard library's records become JSON, too; their chatter below a warning is left out."""
    configure("debug", "json", stream=stream)
    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("asyncio").warning("slow %s", "callback")

    (event,) = lines(stream)
    assert (event["level"], event["logger"], event["event"]) == ("warning", "asyncio", "slow callback")


def test_auto_is_for_people_only_on_a_terminal(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a pipe JSON is written; on a terminal a readable line."""
    configure("info", "auto", stream=stream)
    structlog.get_logger().info("first")
    monkeypatch.setattr(stream, "isatty", lambda: True)
    configure("info", "auto", stream=stream)
    structlog.get_logger().info("second", rc="web")

    first, second = stream.getvalue().splitlines()
    assert json.loads(first)["event"] == "first"
    with pytest.raises(json.JSONDecodeError):
        json.loads(second)
    assert "second" in second


def test_text_of_pods_does_not_control_a_terminal(stream: io.StringIO) -> None:
    """In lines for people, control characters are shown as text, also in an exception's message."""
    configure("info", "console", stream=stream)
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        structlog.get_logger().exception("\u202egone")

    assert "\x1b" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()
    assert "\\u202egone" in stream.getvalue()


@pytest.mark.parametrize("style", ["json", "console"])
def test_the_journal_learns_each_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: Style) -> None:
    """Under systemd every line, those of tracebacks and of libraries too, begins with the event's priority."""
    with (tmp_path / "journal").open("w+") as journal:
        found = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        configure("debug", style, stream=journal)
        log = structlog.get_logger()
        for method in (log.debug, log.info, log.warning, log.error, log.critical):
            method("x")
        logging.getLogger("asyncio").warning("slow")
        try:
            raise RuntimeError("why")
        except RuntimeError:
            log.exception("y")
        journal.seek(0)
        text = journal.read().splitlines()
    assert [line[:3] for line in text[:6]] == ["<7>", "<6>", "<4>", "<3>", "<2>", "<4>"]
    assert {line[:3] for line in text[6:]} == {"<3>"}


def test_elsewhere_lines_have_no_priority(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable inherited from a terminal of the desktop is about another stream than ours."""
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    configure("info", "json", stream=stream)
    structlog.get_logger().warning("x")
    (event,) = lines(stream)
    assert event["event"] == "x"


def test_an_event_costs_less_than_20_microseconds(stream: io.StringIO) -> None:
    """Logging each claim of ten thousand RCs must not be what takes the time. The best of several rounds counts."""
    configure("info", "json", stream=stream)
    log = structlog.get_logger("x")

    def cost() -> float:
        start = time.thread_time()  # not the wall's: other programs of this machine must not count
        for _ in range(2000):
            log.info("Claimed an RC", rc="web", owner="farm-a", token=17, shard="0a")
        return (time.thread_time() - start) / 2000

    assert min(cost() for _ in range(10)) < 20e-6


@pytest.mark.parametrize("style", ["json", "console"])
def test_values_of_secrets_leave_events_and_tracebacks(stream: io.StringIO, style: Style) -> None:
    """Also those of loggers that were used before, and of libraries."""
    configure("info", style, stream=stream)
    log = structlog.get_logger("early")
    log.info("before")
    redactor = Redactor()
    redactor.remember("hunter22")
    remove_from_events(redactor.process)

    log.info("asked with hunter22", url="https://x/?key=hunter22", deep={"list": ["hunter22"]})
    try:
        raise ValueError("refused: hunter22")
    except ValueError:
        log.exception("failed")
        logging.getLogger("library").exception("failed with %s", "hunter22")

    assert "hunter22" not in stream.getvalue()
    assert stream.getvalue().count("[redacted]") >= 6
    assert "before" in stream.getvalue()
