"""Settings of the Framework operator, in the form of frameworkcontroller's `frameworkcontroller.yaml`.

The text under each field gives its unit, its default and the reason. An invalid file is refused at the start; the
message names the field and what to do.

`podFailureSpec` assigns completion codes to failed pods, by patterns over the status of the pod and its containers. The
predefined codes 200, 201 and 210 come first, then the entries of the configuration in their order; the first match
wins. A pattern matches when all of its parts do, and each of its container patterns matches a container of the pod. A
pod that no entry matches keeps the exit code of the container that failed last.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from controllers.framework.api.types import (
    CONTAINER_PERMANENT_FAILED,
    CONTAINER_TRANSIENT_CONFLICT_FAILED,
    CONTAINER_TRANSIENT_FAILED,
    FAILED,
    POD_FAILED_WITHOUT_FAILED_CONTAINER,
    PREDEFINED,
    UNRECOGNIZED_PHRASE,
    CompletionStatus,
    CompletionType,
    completion,
    container_statuses,
    pod_completion,
    terminated,
)
from controllers.framework.re2 import compile_re2
from controllers.framework.settings import ConfigSection, OperatorSettings
from store.decoding import MAX_FILE_VALUES, Undecodable, converted, load_yaml, problem_of, without_nulls
from store.errors import RcfarmError
from store.kube.api.objects import Object, name_of

SHIPPED = "frameworkcontroller.yaml"
_ANYTHING = "(?s).*"


class BadConfig(RcfarmError, ValueError):
    """An invalid configuration; the message names the file, the field and what to do."""


class FrameworkSnapshots(ConfigSection, frozen=True, kw_only=True):
    on_framework_retry: bool = True
    on_framework_deletion: bool = True


class TaskSnapshots(ConfigSection, frozen=True, kw_only=True):
    on_task_retry: bool = True
    on_task_deletion: bool = True


class PodSnapshots(ConfigSection, frozen=True, kw_only=True):
    on_pod_deletion: bool = True


class SnapshotLog(ConfigSection, frozen=True, kw_only=True):
    """The objects that are logged just before they are replaced or deleted. Default: all."""

    framework: FrameworkSnapshots = FrameworkSnapshots()
    task: TaskSnapshots = TaskSnapshots()
    pod: PodSnapshots = PodSnapshots()

    def __contains__(self, trigger: str) -> bool:
        """Return whether snapshots of this trigger, such as `OnTaskRetry`, are logged."""
        return {
            "OnFrameworkRetry": self.framework.on_framework_retry,
            "OnFrameworkDeletion": self.framework.on_framework_deletion,
            "OnTaskRetry": self.task.on_task_retry,
            "OnTaskDeletion": self.task.on_task_deletion,
            "OnPodDeletion": self.pod.on_pod_deletion,
        }.get(trigger, False)


class FrameworkConfig(OperatorSettings, frozen=True, kw_only=True, dict=True):
    """The whole file: the operator's settings, those of its clients, and two that have another form in rcfarm's own
    settings. Durations in seconds."""

    kube_api_server_address: str | None = None
    """Address of the API server. Default: `$KUBE_APISERVER_ADDRESS`, else the kubeconfig's."""

    kube_config_file_path: str | None = None
    """The kubeconfig. Default: `$KUBECONFIG` if that file exists, else `~/.kube/config` if it exists. With neither a
    kubeconfig nor an address, the service account of the operator's pod is used."""

    kube_client_qps: float = 80
    """Requests per second to the API server, above 0 and up to 10000. Default: 80."""

    kube_client_burst: int = 120
    """Requests at once beyond that rate, up to 10000. Default: 120."""

    crd_established_check_interval_sec: int = 1
    """At least 1. Accepted for existing files, but unused; rcfarm checks each second whether Frameworks are served.
    Default: 1."""

    crd_established_check_timeout_sec: int = 60
    """At least 10. Accepted for existing files, but unused; rcfarm waits, not ready, until Frameworks are served.
    Default: 60."""

    log_object_snapshot: SnapshotLog = SnapshotLog()
    """The snapshots that are logged as a history."""

    pod_failure_spec: tuple[PodFailure, ...] = ()
    """Completion codes of failed pods, beyond the predefined ones. Default: none; the file shipped with rcfarm has
    entries for the failures that Kubernetes itself causes."""

    native_mode: bool = False
    """Whether the status is a subresource, with conditions also while there is no problem. Must match the installed
    CRD. Default: false, as in frameworkcontroller."""

    @cached_property
    def failures(self) -> FailureSpec:
        """The compiled `pod_failure_spec`. Raises `BadConfig`."""
        return FailureSpec(self.pod_failure_spec)

    @property
    def conflict_delay(self) -> tuple[int, int]:
        return self.conflict_delay_min, self.conflict_delay_max

    def checked(self) -> FrameworkConfig:
        """Validate and return these settings. Raises `BadConfig`."""
        least, most = self.conflict_delay
        least_name = "frameworkMinRetryDelaySecForTransientConflictFailed"
        for field, is_good, wanted in (
            ("kubeClientQps", 0 < self.kube_client_qps <= 10000, "above 0 and at most 10000"),
            ("kubeClientBurst", 0 <= self.kube_client_burst <= 10000, "within 0 to 10000"),
            ("workerNumber", self.workers > 0, "above 0"),
            ("crdEstablishedCheckIntervalSec", self.crd_established_check_interval_sec >= 1, "at least 1"),
            ("crdEstablishedCheckTimeoutSec", self.crd_established_check_timeout_sec >= 10, "at least 10"),
            ("objectLocalCacheCreationTimeoutSec", self.cache_timeout >= 60, "at least 60"),
            ("headlessServices", self.native_mode or not self.headless_services, "false in compatible mode"),
            ("disruptionBudgets", self.native_mode or not self.disruption_budgets, "false in compatible mode"),
            (least_name, least >= 0, "at least 0"),
            ("frameworkMaxRetryDelaySecForTransientConflictFailed", most >= least, f"at least {least_name} ({least})"),
        ):
            if not is_good:
                raise BadConfig(f"{field}: must be {wanted}")
        _ = self.failures
        return self


def read_config(path: Path) -> FrameworkConfig:
    """Read the settings from a file, which must exist and may be empty. Raises `BadConfig`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: can't be read: {error}") from error
    try:
        return parse_config(text)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from error


def shipped_config() -> FrameworkConfig:
    """Return the settings shipped with rcfarm."""
    return parse_config(resources.files(__package__).joinpath(SHIPPED).read_text(encoding="utf-8"))


def parse_config(text: str) -> FrameworkConfig:
    """Parse and validate settings in YAML. Raises `BadConfig`."""
    try:
        fields = load_yaml(text, max_values=MAX_FILE_VALUES)
    except Undecodable as error:
        raise BadConfig(str(error)) from error
    try:
        return converted(without_nulls({} if fields is None else fields), FrameworkConfig).checked()
    except Undecodable as error:
        problem = problem_of(error)
        what = problem.what
        if problem.unknown:
            close = difflib.get_close_matches(problem.field, FrameworkConfig.__struct_encode_fields__, n=1)
            what += f"; did you mean {close[0]}?" if close else ""
        raise BadConfig(f"{problem.field}: {what}" if problem.field else what) from error


class IntRange(ConfigSection, frozen=True, kw_only=True):
    """A range that includes both ends; None: no limit."""

    min: int | None = None
    max: int | None = None

    def __contains__(self, value: int) -> bool:
        return (self.min is None or self.min <= value) and (self.max is None or value <= self.max)


class ContainerPattern(ConfigSection, frozen=True, kw_only=True):
    """All fields but the name match only a container that has terminated. Regular expressions are RE2's, unanchored."""

    name_regex: str | None = None
    reason_regex: str | None = None
    message_regex: str | None = None
    signal_range: IntRange | None = None
    code_range: IntRange | None = None


class PodPattern(ConfigSection, frozen=True, kw_only=True):
    name_regex: str | None = None
    reason_regex: str | None = None
    message_regex: str | None = None
    containers: tuple[ContainerPattern, ...] | None = ()


class FailureType(ConfigSection, frozen=True, kw_only=True):
    name: str = FAILED
    attributes: tuple[str, ...] | None = ()


class PodFailure(ConfigSection, frozen=True, kw_only=True):
    """One entry: a pod that matches any of its patterns gets this code."""

    code: int | None = None
    phrase: str = ""
    type: FailureType = FailureType()
    pod_patterns: tuple[PodPattern, ...] | None = ()


@dataclass(frozen=True, slots=True)
class _Matcher:
    """One compiled pattern, of a pod or of a container: its regular expressions and ranges by the field they read."""

    texts: tuple[tuple[str, re.Pattern[str]], ...]
    ranges: tuple[tuple[str, IntRange], ...] = ()
    containers: tuple[_Matcher, ...] = ()

    def matched(self, fields: Mapping[str, Any], containers: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
        """Return the matched values by field; None when a field does not match or is absent. `containers`: the fields
        of the pod's containers, of which each container pattern must match one."""
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
        echoes = []
        for wanted in self.containers:
            echo = next((echo for container in containers if (echo := wanted.matched(container)) is not None), None)
            if echo is None:
                return None
            echoes.append(echo)
        return {**found, "containers": echoes} if echoes else found


@dataclass(frozen=True, slots=True)
class _Entry:
    code: int
    phrase: str
    type: CompletionType
    patterns: tuple[_Matcher, ...]


class FailureSpec:
    """The compiled `podFailureSpec`."""

    def __init__(self, entries: Iterable[PodFailure] = ()) -> None:
        """Compile the entries. Raises `BadConfig` for an entry without code or patterns, with a code that is
        taken, or that is not a failure."""
        exits = (CONTAINER_TRANSIENT_FAILED, CONTAINER_TRANSIENT_CONFLICT_FAILED, CONTAINER_PERMANENT_FAILED)
        self._entries = []
        for exit_code in exits:
            only = IntRange(min=exit_code, max=exit_code)
            ended = ContainerPattern(name_regex=_ANYTHING, message_regex=_ANYTHING, code_range=only)
            patterns = (_pod_matcher("", PodPattern(containers=(ended,))),)
            self._entries.append(_Entry(exit_code, *PREDEFINED[exit_code], patterns))
        taken: set[int] = set()
        for position, entry in enumerate(entries):
            at, code = f"podFailureSpec[{position}]", entry.code
            if code is None:
                raise BadConfig(f"{at}.code: is missing")
            if -999 <= code <= 0 or 200 <= code <= 219:
                raise BadConfig(f"{at}.code: {code} is reserved, as all within -999 to 0 and 200 to 219; use another")
            if entry.type.name != FAILED:
                raise BadConfig(
                    f"{at}.type.name: must be {FAILED}, not {entry.type.name!r}: only failed pods are matched"
                )
            if not entry.pod_patterns:
                raise BadConfig(f"{at}.podPatterns: must hold at least one pattern")
            compiled = tuple(_pod_matcher(f"{at}.podPatterns[{i}]", each) for i, each in enumerate(entry.pod_patterns))
            if code in taken:
                raise BadConfig(f"{at}.code: {code} is given twice; keep one")
            taken.add(code)
            kind = CompletionType(name=FAILED, attributes=entry.type.attributes or ())
            self._entries.append(_Entry(code, entry.phrase, kind, compiled))

    def outcome(self, pod: Object) -> CompletionStatus:
        """Return the outcome of a pod in phase Failed."""
        summary = pod_completion(pod)
        status = pod.get("status") or {}
        fields = {"name": name_of(pod), "reason": status.get("reason") or "", "message": status.get("message") or ""}
        containers: list[dict[str, Any]] = []
        failed: list[tuple[Any, Object]] = []  # the containers that did, by name, with how they ended
        for container in container_statuses(pod):
            seen: dict[str, Any] = {"name": container.get("name") or ""}
            ended = terminated(container)
            if ended is not None:
                seen |= {"reason": ended.get("reason") or "", "message": ended.get("message") or ""}
                seen |= {"signal": ended.get("signal") or 0, "code": ended.get("exitCode") or 0}
                if ended.get("exitCode"):
                    failed.append((container.get("name"), ended))
            containers.append(seen)
        for entry in self._entries:
            for pattern in entry.patterns:
                found = pattern.matched(fields, containers)
                if found is not None:
                    text = f"matched {msgspec.json.encode(found).decode()}"
                    return CompletionStatus(
                        code=entry.code, phrase=entry.phrase, type=entry.type, diagnostics=text, pod=summary
                    )
        if not failed:
            diagnostics = "the pod failed, but none of its containers did"
            return completion(POD_FAILED_WITHOUT_FAILED_CONTAINER, diagnostics, pod=summary)
        name, last = max(failed, key=lambda item: item[1].get("finishedAt") or "")  # RFC 3339 sorts as time does
        code = int(last["exitCode"])
        text = f"container {name} exited with {code}; no pattern of podFailureSpec matched"
        kind = CompletionType(name=FAILED)
        return CompletionStatus(code=code, phrase=UNRECOGNIZED_PHRASE, type=kind, diagnostics=text, pod=summary)


def _pod_matcher(at: str, pattern: PodPattern) -> _Matcher:
    containers = []
    for position, container in enumerate(pattern.containers or ()):
        ranges = (("signal", container.signal_range), ("code", container.code_range))
        limited = tuple((field, allowed) for field, allowed in ranges if allowed not in (None, IntRange()))
        containers.append(_Matcher(_texts(f"{at}.containers[{position}]", container), limited))
    return _Matcher(_texts(at, pattern), containers=tuple(containers))


def _texts(at: str, pattern: PodPattern | ContainerPattern) -> tuple[tuple[str, re.Pattern[str]], ...]:
    expressions = {"name": pattern.name_regex, "reason": pattern.reason_regex, "message": pattern.message_regex}
    compiled = []
    for field, expression in expressions.items():
        if expression is None:
            continue
        try:
            compiled.append((field, compile_re2(expression)))
        except ValueError as error:
            raise BadConfig(f"{at}.{field}Regex: {error}") from error
    return tuple(compiled)
