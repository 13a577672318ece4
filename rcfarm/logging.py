"""Logging: structlog for everything, JSON lines for machines, colours for a terminal.

`configure` is called once, by the program's entry point. Modules only say `log = structlog.get_logger(__name__)` at
their top and pass what they know as keys: `rc`, `node`, `pod`, `owner`, `token` (the fencing token), `session`. An
event below the level costs one call that does nothing. What libraries log comes out in the same form.

Under systemd each line begins with its priority, `<4>` for a warning, so that `journalctl -p warning` finds it; the
journal takes that off again.

Secrets: a value under a key that names one is replaced, whoever logged it. (`token` is a number, the fencing token;
text under that key is a credential.) Tracebacks leave out the values of local variables for the same reason.
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

from rcfarm.visible import visible

Level = Literal["debug", "info", "warning", "error"]
Style = Literal["auto", "json", "console"]

REDACTED = "[redacted]"
_SECRET_KEYS = frozenset({"authorization", "password", "secret", "acl_token", "web_token", "x-consul-token"})
_LIBRARY_LEVEL = logging.WARNING  # below it aiohttp and asyncio tell about every request

_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}  # as syslog(3) numbers them

_encoder = msgspec.json.Encoder(enc_hook=str)


class _NamedLogger(structlog.WriteLogger):
    """Writes lines, and knows the module that asked for it."""

    def __init__(self, stream: TextIO, name: str = "") -> None:
        super().__init__(stream)
        self.name = name


def configure(level: Level = "info", style: Style = "auto", *, stream: TextIO | None = None) -> None:
    """Send every event of at least `level` to `stream` (standard error).

    `auto` is `console` when the stream is a terminal, and `json` otherwise. Loggers that were used before a second call
    keep what the first one said.
    """
    stream = stream or sys.stderr
    minimum = getattr(logging, level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    as_json = style == "json" or (style == "auto" and not stream.isatty())
    final = _json() if as_json else _console(stream)
    if _is_journal(stream):
        final[-1] = _with_priority(final[-1])
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(minimum),
        logger_factory=lambda *names: _NamedLogger(stream, *names),
        cache_logger_on_first_use=True,
    )
    _configure_libraries(stream, max(minimum, _LIBRARY_LEVEL), shared, final)


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, render_json]


def _console(stream: TextIO) -> list[Processor]:
    """For people: control characters in what is logged are shown as text."""
    renderer = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
    )
    return [_show_controls, renderer]


def _show_controls(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = visible(value)
    return event


def _is_journal(stream: TextIO) -> bool:
    """Whether what is written there goes to systemd's journal: JOURNAL_STREAM names the device and inode of that."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _with_priority(render: Processor) -> Processor:
    """The renderer, with the priority of the event before each of its lines."""

    def prefixed(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        prefix = f"<{_PRIORITIES.get(event.get('level', ''), 6)}>"
        text = render(logger, method, event)
        return "\n".join(prefix + line for line in str(text).splitlines())

    return prefixed


def _configure_libraries(stream: TextIO, minimum: int, shared: list[Processor], final: list[Processor]) -> None:
    """Send what the standard library's logging receives through the same processors."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(minimum)


def redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace what a secret's key holds."""
    for key in event.keys() & _SECRET_KEYS:
        event[key] = REDACTED
    if isinstance(event.get("token"), str):
        event["token"] = REDACTED
    return event


def render_json(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """One JSON object: time, level and event first, then what the caller added. Unknown types become their text."""
    first = {key: event.pop(key, "") for key in ("timestamp", "level", "event")}
    return _encoder.encode({**first, **event}).decode()
