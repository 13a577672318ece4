"""Logging: structlog for everything, JSON lines for machines, colours for a terminal.

`configure` is called once, by the program's entry point. Modules only define `log = structlog.get_logger(__name__)` and
pass fields as keywords: `rc`, `node`, `pod`, `owner`, `token` (the fencing token), `session`. An event below the level
costs one empty call. Records of libraries are logged in the same form.

Under systemd each line begins with its priority, `<4>` for a warning, so that `journalctl -p warning` finds it; the
journal removes it.

Secrets: values under keys that name a secret are replaced. (`token` is a number, the fencing token; text under that key
is a credential.) Tracebacks do not contain local variables, for the same reason. A role that knows secrets has
their values removed from every event, tracebacks included: `remove_from_events`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import Processor

from rcfarm.daemon.visible import visible

Level = Literal["debug", "info", "warning", "error"]
Style = Literal["auto", "json", "console"]

REDACTED = "[redacted]"
_SECRET_KEYS = frozenset({"authorization", "password", "secret", "acl_token", "web_token", "x-consul-token"})
_LIBRARY_LEVEL = logging.WARNING  # below it aiohttp and asyncio log every request

_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}  # as syslog(3) numbers them

_removals: list[Processor] = []

_encoder = msgspec.json.Encoder(enc_hook=str)


class _NamedLogger(structlog.WriteLogger):
    """Writes lines, and has the name of the module that logs."""

    def __init__(self, stream: TextIO, name: str = "") -> None:
        super().__init__(stream)
        self.name = name


def configure(level: Level = "info", style: Style = "auto", *, stream: TextIO | None = None) -> None:
    """Send every event of at least `level` to `stream` (standard error).

    `auto` is `console` when the stream is a terminal, and `json` otherwise. Loggers already used keep their
    configuration on a second call.
    """
    stream = stream or sys.stderr
    minimum = getattr(logging, level.upper())
    _removals.clear()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    as_json = style == "json" or (style == "auto" and not stream.isatty())
    final: list[Processor]
    if as_json:
        final = [structlog.processors.format_exc_info, _remove, render_json]
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
        final = [structlog.processors.format_exc_info, _remove, _show_controls, renderer]
    try:
        found = os.fstat(stream.fileno())
        journal = f"{found.st_dev}:{found.st_ino}"
    except (OSError, ValueError):  # closed, or no file at all
        journal = ""
    if journal and os.environ.get("JOURNAL_STREAM") == journal:  # systemd names the journal's device and inode
        final[-1] = _with_priority(final[-1])
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(minimum),
        logger_factory=lambda *names: _NamedLogger(stream, *names),
        cache_logger_on_first_use=True,
    )
    # records of the standard library's logging pass the same processors
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(minimum, _LIBRARY_LEVEL))


def remove_from_events(processor: Processor) -> None:
    """Have `processor` change every event in place, after its traceback is text, until the next `configure`."""
    _removals.append(processor)


def _remove(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for processor in _removals:
        processor(logger, method, event)
    return event


def _show_controls(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = visible(value)
    return event


def _with_priority(render: Processor) -> Processor:
    """Return a renderer that puts the event's priority before each line."""

    def prefixed(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        prefix = f"<{_PRIORITIES.get(event.get('level', ''), 6)}>"
        text = render(logger, method, event)
        return "\n".join(prefix + line for line in str(text).splitlines())

    return prefixed


def redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the values of keys that name a secret."""
    for key in event.keys() & _SECRET_KEYS:
        event[key] = REDACTED
    if isinstance(event.get("token"), str):
        event["token"] = REDACTED
    return event


def render_json(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """Return one JSON object: time, level and event first, then the caller's fields. Unknown types become text."""
    first = {key: event.pop(key, "") for key in ("timestamp", "level", "event")}
    return _encoder.encode({**first, **event}).decode()
