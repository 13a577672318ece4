"""The rules of analyses, purely: which are valid, what an answer means, and what the results mean for a rollout.

success   what was asked for holds
failure   it does not: beyond `failure_limit` the rollout goes back
no_data   there is nothing to judge by: the rollout is paused until there is
error     there is no answer: it is asked again, and after `ERRORS` in a row the rollout is paused
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from rcfarm.operations.fleet import listed
from store.decoding import Undecodable, from_json, json_decoder
from store.schema.keys import is_dns_label
from store.schema.records import (
    Analysis,
    AnalysisOutcome,
    AnalysisResult,
    HttpAnalysis,
    PrometheusAnalysis,
    Reason,
    UpdatePolicy,
)

MOST = 8  # analyses of one RC
INTERVAL = (1.0, 3600.0)  # seconds
TIMEOUT = (0.1, 300.0)  # seconds
MOST_FAILURES = 100  # that a rollout can be allowed
ERRORS = 4  # in a row, as Argo Rollouts' `consecutiveErrorLimit`
LONGEST_URL = 2000  # characters
LONGEST_QUERY = 4000  # characters
PAUSES = frozenset({"analysis_no_data", "analysis_error"})

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_CONDITION = re.compile(r"(<=|>=|==|!=|<|>) *(-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?)")
_URL = re.compile(
    r"https?://(?:[a-z0-9][a-z0-9._-]*|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?:[/?][!-\"$-~]*)?", re.I
)
_HOST = re.compile(r"\[?(?P<host>[^\[\]]+?)\]?(?::(?P<port>[0-9]{1,5}))?")


class Problem(NamedTuple):
    """The error in an analysis. `field`: its path within the analysis."""

    field: str
    text: str


class Measured(NamedTuple):
    """One run. `value`: what was measured, or why there is no answer; nothing else of an answer is kept."""

    outcome: AnalysisOutcome
    value: str


class Condition(NamedTuple):
    """A comparison with a number."""

    operator: str
    limit: float

    def holds(self, value: float) -> bool:
        return _OPERATORS[self.operator](value, self.limit)


def condition_of(text: str) -> Condition | None:
    """Return the condition that the text stands for, such as `< 0.01`; None if it is none."""
    found = _CONDITION.fullmatch(text.strip(" "))
    limit = float(found[2]) if found else math.inf
    return Condition(found[1], limit) if found and math.isfinite(limit) else None


def problem_of(analysis: Analysis) -> Problem | None:
    """Return the first error in an analysis, or None."""
    if not is_dns_label(analysis.name):
        text = f"{analysis.name!r} is not a DNS label (lower-case letters, digits and '-', at most 63)"
        return Problem("name", text)
    given = [
        kind
        for kind, value in (("http", analysis.http), ("prometheus", analysis.prometheus), ("command", analysis.command))
        if value
    ]
    if len(given) != 1:
        return Problem("", f"has {' and '.join(given) or 'nothing to run'}; give one of http, prometheus and command")
    for field, (least, most) in (("interval", INTERVAL), ("timeout", TIMEOUT)):
        if not least <= getattr(analysis, field) <= most:
            return Problem(field, f"{getattr(analysis, field):g} s must be between {least:g} and {most:g} s")
    if analysis.failure_limit > MOST_FAILURES:
        return Problem("failure_limit", f"{analysis.failure_limit} is more than {MOST_FAILURES}; lower it")
    if analysis.command and not is_dns_label(analysis.command):
        text = f"{analysis.command!r} is not the name of a command; farms list them in `farm.analysis_commands`"
        return Problem("command", text)
    if (http := analysis.http) is not None:
        if problem := _problem_of_url(http.url):
            return Problem("http.url", problem)
        if http.status is not None and not 200 <= http.status <= 599:
            return Problem("http.status", f"{http.status} is not a final status; give one of 200 to 599")
    if (prometheus := analysis.prometheus) is not None:
        if problem := _problem_of_url(prometheus.url):
            return Problem("prometheus.url", problem)
        if "?" in prometheus.url:
            return Problem(
                "prometheus.url", "give Prometheus's address without a query, such as http://prometheus:9090"
            )
        if not 0 < len(prometheus.query.strip()) <= len(prometheus.query) <= LONGEST_QUERY:
            return Problem("prometheus.query", f"give a query of at most {LONGEST_QUERY} characters")
        if condition_of(prometheus.condition) is None:
            text = f"{prometheus.condition!r} is not a comparison with a number; write one as in '< 0.01'"
            return Problem("prometheus.condition", f"{text} (<, <=, >, >=, ==, !=)")
    return None


def problem_of_all(analyses: Sequence[Analysis]) -> Problem | None:
    """Return the first error in a list of analyses; `field` begins with the index of the one at fault."""
    if len(analyses) > MOST:
        return Problem("", f"has {len(analyses)} entries; at most {MOST} are allowed")
    for number, analysis in enumerate(analyses):
        if problem := problem_of(analysis):
            return problem._replace(field=f"{number}.{problem.field}".rstrip("."))
        if any(earlier.name == analysis.name for earlier in analyses[:number]):
            return Problem(f"{number}.name", f"{analysis.name!r} is given twice; choose another name")
    return None


def _problem_of_url(url: str) -> str:
    """Return why the URL can't be called, or "". Only plain ones pass, which every parser reads in the same way."""
    shown = url if len(url) <= 100 else f"{url[:100]}…"
    if "@" in url.partition("://")[2].partition("/")[0]:
        return "has credentials, which everyone who can read the RC would see; leave them out"
    found = _URL.fullmatch(url)
    if found is None or len(url) > LONGEST_URL:
        return f"{shown!r} is not a URL that can be called: http:// or https://, a host, then a path, without fragment"
    if found["port"] is not None and not 0 < int(found["port"]) < 65536:
        return f"{found['port']} is not a port"
    return ""


def is_allowed(host: str, port: int | None, patterns: Collection[str]) -> bool:
    """Return whether one of the patterns, `host` or `host:port`, allows this place; `*` stands for any text of a host.
    Without patterns every place is allowed."""
    for pattern in patterns:
        found = _HOST.fullmatch(pattern.lower())
        if found is None or (found["port"] is not None and int(found["port"]) != port):
            continue
        if re.fullmatch(re.escape(found["host"]).replace(r"\*", ".*"), host.lower().strip("[]")):
            return True
    return not patterns


def of_status(asked: HttpAnalysis, status: int) -> Measured:
    """Return what the status of an answer means."""
    if status == asked.status or (asked.status is None and 200 <= status < 300 and status != 204):
        return Measured("success", str(status))
    return Measured("no_data" if status == 204 else "failure", str(status))


def of_exit(code: int) -> Measured:
    """Return what the end of a command means; a negative code is the signal that ended it."""
    if code < 0:
        return Measured("error", f"ended by signal {-code}")
    outcomes: dict[int, AnalysisOutcome] = {0: "success", 1: "failure", 2: "no_data"}
    return Measured(outcomes.get(code, "error"), f"exit code {code}")


def of_prometheus(asked: PrometheusAnalysis, status: int, body: bytes) -> Measured:
    """Return what an answer of Prometheus's HTTP API to an instant query means."""
    condition = condition_of(asked.condition)
    if condition is None:  # written by another client
        return Measured("error", "the condition is not valid")
    if status != 200:
        return Measured("error", f"status {status}")
    try:
        answer = from_json(json_decoder(Any), body)
        if answer["status"] != "success":
            return Measured("error", "the query failed")
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        if kind == "vector" and len(result) != 1:
            several = Measured("error", f"{len(result)} series; the query must return one")
            return several if result else Measured("no_data", "no series")
        if kind not in ("vector", "scalar"):
            return Measured("error", "the query returns no number")
        text = (result[0]["value"] if kind == "vector" else result)[1]
        value = float(text if isinstance(text, str) else "")
    except (Undecodable, LookupError, TypeError, ValueError):
        return Measured("error", "not an answer of Prometheus")
    if math.isnan(value):
        return Measured("no_data", "NaN")
    return Measured("success" if condition.holds(value) else "failure", f"{value:g}")


def counted(before: AnalysisResult | None, name: str, measured: Measured, at: str, *, counts: bool) -> AnalysisResult:
    """Return the result after a further run. `counts`: it began since the rollout came into its present state."""
    before = before or AnalysisResult(name=name, outcome=measured.outcome)
    return AnalysisResult(
        name=name,
        outcome=measured.outcome,
        value=measured.value,
        at=at,
        failures=before.failures + (measured.outcome == "failure"),
        errors=before.errors + 1 if measured.outcome == "error" else 0,
        passed=before.passed + (counts and measured.outcome == "success"),
    )


def is_news(before: AnalysisResult | None, after: AnalysisResult) -> bool:
    """Return whether a further run may change what the rollout does: most only repeat the one before."""

    def apart(result: AnalysisResult) -> tuple[object, ...]:
        return result.outcome, result.failures, min(result.errors, ERRORS), result.passed > 0

    return before is None or apart(before) != apart(after)


def renewed(results: Iterable[AnalysisResult]) -> tuple[AnalysisResult, ...]:
    """Return the results as a rollout takes them into another state, in which each analysis must succeed again."""
    return tuple(msgspec.structs.replace(result, passed=0) for result in results)


def all_passed(policy: UpdatePolicy) -> dict[str, AnalysisResult]:
    """Return results as they are if every analysis succeeds, for previews."""
    return {each.name: AnalysisResult(name=each.name, outcome="success", passed=1) for each in policy.analysis}


def lacking(policy: UpdatePolicy, results: Sequence[AnalysisResult]) -> list[str]:
    """Return the analyses that have not succeeded since the rollout came into its state."""
    passed = {result.name for result in results if result.passed}
    return [each.name for each in policy.analysis if each.name not in passed]


def failure(policy: UpdatePolicy, results: Sequence[AnalysisResult]) -> str:
    """Return which analysis has failed too often, what it measured, and what it should have; "" if none has."""
    for analysis, result in _both(policy, results):
        if result.failures > analysis.failure_limit:
            if result.outcome != "failure":
                missed = "it succeeded again too late"
            elif analysis.prometheus is not None:
                missed = f"{result.value} is not {analysis.prometheus.condition.strip()}"
            elif analysis.http is not None:
                missed = f"status {result.value}, not {analysis.http.status or '2xx'}"
            else:
                missed = f"{analysis.command} ended with {result.value}"
            count = f" ({result.failures} failures, failure_limit is {analysis.failure_limit})"
            return f"analysis {analysis.name}: {missed}{count if analysis.failure_limit else ''}"
    return ""


def pause(rc_id: str, policy: UpdatePolicy, results: Sequence[AnalysisResult], *, is_paused: bool) -> Reason | None:
    """Return why the rollout must wait for an analysis. `is_paused`: it waits for one already, so that one error is
    enough."""
    for analysis, result in _both(policy, results):
        hint = f"`rcfarm rollout resume {rc_id}` asks at once, `rcfarm rollout abort {rc_id}` goes back"
        if result.outcome == "no_data":
            text = f"analysis {analysis.name} has no data ({result.value}); it goes on when data comes; {hint}"
            return Reason("analysis_no_data", text)
        if result.outcome == "error" and (is_paused or result.errors >= ERRORS):
            text = f"analysis {analysis.name} has no answer ({result.value}); it goes on when there is one; {hint}"
            return Reason("analysis_error", text)
    return None


def described(policy: UpdatePolicy, results: Sequence[AnalysisResult]) -> list[str]:
    """Return a line for each analysis: its last outcome, the value, and what is asked for."""
    known = {result.name: result for result in results}
    lines = []
    for analysis in policy.analysis:
        result = known.get(analysis.name)
        if result is None:
            lines.append(f"{analysis.name}: has not run yet; {_wanted(analysis)}")
            continue
        value = f" ({result.value})" if result.value else ""
        limit = (
            f"; failures: {result.failures}, failure_limit is {analysis.failure_limit}"
            if analysis.failure_limit
            else ""
        )
        lines.append(f"{analysis.name}: {result.outcome.replace('_', ' ')}{value}; {_wanted(analysis)}{limit}")
    return lines


def gates(policy: UpdatePolicy) -> str:
    """Return a remark that analyses decide on the rollout, for plans; "" without any."""
    names = listed(each.name for each in policy.analysis)
    return f"goes on only while its analyses succeed: {names}; the plan assumes that they do" if names else ""


def _both(policy: UpdatePolicy, results: Sequence[AnalysisResult]) -> list[tuple[Analysis, AnalysisResult]]:
    known = {result.name: result for result in results}
    return [(each, known[each.name]) for each in policy.analysis if each.name in known]


def _wanted(analysis: Analysis) -> str:
    if analysis.prometheus is not None:
        return f"wanted {analysis.prometheus.condition.strip()}"
    if analysis.http is not None:
        return f"wanted {analysis.http.status or '2xx'}"
    return f"wanted exit code 0 of {analysis.command}"
