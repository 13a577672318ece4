"""`podFailureSpec`: assigns completion codes to failed pods, by patterns over the status of the pod and its containers.

The predefined codes 200, 201 and 210 come first, then the entries of the configuration in their order; the first match
wins. A pattern matches when all of its parts do, and each of its container patterns matches a container of the pod. A
pod that no entry matches keeps the exit code of the container that failed last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from controllers.framework.api.codes import (
    CONTAINER_PERMANENT_FAILED,
    CONTAINER_TRANSIENT_CONFLICT_FAILED,
    CONTAINER_TRANSIENT_FAILED,
    POD_FAILED_WITHOUT_FAILED_CONTAINER,
    PREDEFINED,
    UNRECOGNIZED_PHRASE,
    completion,
    container_statuses,
    is_reserved,
    pod_completion,
    terminated,
)
from controllers.framework.api.types import FAILED, CompletionStatus, CompletionType, PodCompletion
from controllers.framework.config.re2 import compile_re2
from store.errors import RcfarmError
from store.kube.api.objects import Object, name_of

_ANYTHING = "(?s).*"


class _Config(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of the types in the configuration file."""


class IntRange(_Config, frozen=True, kw_only=True):
    """A range that includes both ends; None: no limit."""

    min: int | None = None
    max: int | None = None

    def __contains__(self, value: int) -> bool:
        return (self.min is None or self.min <= value) and (self.max is None or value <= self.max)


class ContainerPattern(_Config, frozen=True, kw_only=True):
    """All fields but the name match only a container that has terminated. Regular expressions are RE2's, unanchored."""

    name_regex: str | None = None
    reason_regex: str | None = None
    message_regex: str | None = None
    signal_range: IntRange | None = None
    code_range: IntRange | None = None


class PodPattern(_Config, frozen=True, kw_only=True):
    name_regex: str | None = None
    reason_regex: str | None = None
    message_regex: str | None = None
    containers: tuple[ContainerPattern, ...] | None = ()


class FailureType(_Config, frozen=True, kw_only=True):
    name: str = FAILED
    attributes: tuple[str, ...] | None = ()


class PodFailure(_Config, frozen=True, kw_only=True):
    """One entry: a pod that matches any of its patterns gets this code."""

    code: int | None = None
    phrase: str = ""
    type: FailureType = FailureType()
    pod_patterns: tuple[PodPattern, ...] | None = ()


class BadFailureSpec(RcfarmError, ValueError):
    """An invalid entry; the message names its place and what to do."""


@dataclass(frozen=True, slots=True)
class _Matcher:
    """One compiled pattern, of a pod or of a container: its regular expressions and ranges by the field they read."""

    texts: tuple[tuple[str, re.Pattern[str]], ...]
    ranges: tuple[tuple[str, IntRange], ...] = ()
    containers: tuple[_Matcher, ...] = ()

    def matched(self, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the matched values by field; None when a field does not match or is absent."""
        found: dict[str, Any] = {}
        for field, expression in self.texts:
            match = expression.search(fields[field]) if field in fields else None
            if match is None:
                return None
            found[field] = match[0]
        for field, allowed in self.ranges:
            if field not in fields or fields[field] not in allowed:
                return None
            found[field] = fields[field]
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    code: int
    phrase: str
    type: CompletionType
    patterns: tuple[_Matcher, ...]


class FailureSpec:
    """The compiled `podFailureSpec`."""

    def __init__(self, entries: Iterable[PodFailure] = ()) -> None:
        """Compile the entries. Raises `BadFailureSpec` for an entry without code or patterns, with a code that is
        taken, or that is not a failure."""
        exits = (CONTAINER_TRANSIENT_FAILED, CONTAINER_TRANSIENT_CONFLICT_FAILED, CONTAINER_PERMANENT_FAILED)
        self._entries = [_predefined(code) for code in exits]
        taken: set[int] = set()
        for position, entry in enumerate(entries):
            compiled = _compiled(f"podFailureSpec[{position}]", entry)
            if compiled.code in taken:
                raise BadFailureSpec(f"podFailureSpec[{position}].code: {compiled.code} is given twice; keep one")
            taken.add(compiled.code)
            self._entries.append(compiled)

    def outcome(self, pod: Object) -> CompletionStatus:
        """Return the outcome of a pod in phase Failed."""
        summary = pod_completion(pod)
        status = pod.get("status") or {}
        fields = {"name": name_of(pod), "reason": status.get("reason") or "", "message": status.get("message") or ""}
        containers = [_container_fields(container) for container in container_statuses(pod)]
        for entry in self._entries:
            for pattern in entry.patterns:
                found = _matched(pattern, fields, containers)
                if found is not None:
                    echo = msgspec.json.encode(found).decode()
                    return _outcome(entry.code, entry.phrase, entry.type, f"matched {echo}", summary)
        return _unmatched(pod, summary)


def _unmatched(pod: Object, summary: PodCompletion) -> CompletionStatus:
    failed = [
        (container.get("name"), ended)
        for container in container_statuses(pod)
        if (ended := terminated(container)) and ended.get("exitCode")
    ]
    if not failed:
        diagnostics = "the pod failed, but none of its containers did"
        return completion(POD_FAILED_WITHOUT_FAILED_CONTAINER, diagnostics, pod=summary)
    name, last = max(failed, key=lambda item: item[1].get("finishedAt") or "")  # RFC 3339 sorts as time does
    code = int(last["exitCode"])
    diagnostics = f"container {name} exited with {code}; no pattern of podFailureSpec matched"
    return _outcome(code, UNRECOGNIZED_PHRASE, CompletionType(name=FAILED), diagnostics, summary)


def _outcome(
    code: int, phrase: str, kind: CompletionType, diagnostics: str, summary: PodCompletion
) -> CompletionStatus:
    return CompletionStatus(code=code, phrase=phrase, type=kind, diagnostics=diagnostics, pod=summary)


def _matched(pattern: _Matcher, pod: Mapping[str, Any], containers: list[dict[str, Any]]) -> dict[str, Any] | None:
    found = pattern.matched(pod)
    if found is None:
        return None
    echoes = []
    for wanted in pattern.containers:
        echo = next((echo for fields in containers if (echo := wanted.matched(fields)) is not None), None)
        if echo is None:
            return None
        echoes.append(echo)
    return {**found, "containers": echoes} if echoes else found


def _container_fields(container: Object) -> dict[str, Any]:
    """Return the fields that patterns can match; only the name while the container has not terminated."""
    fields: dict[str, Any] = {"name": container.get("name") or ""}
    ended = terminated(container)
    if ended is not None:
        fields |= {"reason": ended.get("reason") or "", "message": ended.get("message") or ""}
        fields |= {"signal": ended.get("signal") or 0, "code": ended.get("exitCode") or 0}
    return fields


def _predefined(code: int) -> _Entry:
    exits = ContainerPattern(name_regex=_ANYTHING, message_regex=_ANYTHING, code_range=IntRange(min=code, max=code))
    info = PREDEFINED[code]
    return _Entry(code, info.phrase, info.type, (_pod_matcher("", PodPattern(containers=(exits,))),))


def _compiled(at: str, entry: PodFailure) -> _Entry:
    if entry.code is None:
        raise BadFailureSpec(f"{at}.code: is missing")
    if is_reserved(entry.code):
        raise BadFailureSpec(
            f"{at}.code: {entry.code} is reserved, as all within -999 to 0 and 200 to 219; use another"
        )
    if entry.type.name != FAILED:
        raise BadFailureSpec(f"{at}.type.name: must be {FAILED}, not {entry.type.name!r}: only failed pods are matched")
    if not entry.pod_patterns:
        raise BadFailureSpec(f"{at}.podPatterns: must hold at least one pattern")
    patterns = tuple(
        _pod_matcher(f"{at}.podPatterns[{position}]", pattern) for position, pattern in enumerate(entry.pod_patterns)
    )
    kind = CompletionType(name=FAILED, attributes=entry.type.attributes or ())
    return _Entry(entry.code, entry.phrase, kind, patterns)


def _pod_matcher(at: str, pattern: PodPattern) -> _Matcher:
    containers = tuple(
        _container_matcher(f"{at}.containers[{position}]", container)
        for position, container in enumerate(pattern.containers or ())
    )
    return _Matcher(_texts(at, pattern), containers=containers)


def _container_matcher(at: str, pattern: ContainerPattern) -> _Matcher:
    ranges = (("signal", pattern.signal_range), ("code", pattern.code_range))
    limited = tuple((field, allowed) for field, allowed in ranges if allowed not in (None, IntRange()))
    return _Matcher(_texts(at, pattern), limited)


def _texts(at: str, pattern: PodPattern | ContainerPattern) -> tuple[tuple[str, re.Pattern[str]], ...]:
    expressions = {"name": pattern.name_regex, "reason": pattern.reason_regex, "message": pattern.message_regex}
    compiled = []
    for field, expression in expressions.items():
        if expression is None:
            continue
        try:
            compiled.append((field, compile_re2(expression)))
        except ValueError as error:
            raise BadFailureSpec(f"{at}.{field}Regex: {error}") from error
    return tuple(compiled)
