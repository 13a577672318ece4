"""Analyses in an RC's file: what is read, shown and refused, each mistake with its line and field; and their rules."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rcfarm.operations import rc_apply
from rcfarm.operations.analysis import (
    INTERVAL,
    LONGEST_QUERY,
    LONGEST_URL,
    MOST,
    TIMEOUT,
    condition_of,
    is_allowed,
    of_prometheus,
    problem_of_all,
)
from rcfarm.operations.documents import BadFile
from rcfarm.operations.errors import BadInput
from rcfarm.operations.rc_spec import check_update
from store.schema.records import Analysis, HttpAnalysis, PrometheusAnalysis, RCSpec, UpdatePolicy

HEAD = "manifest: {id: hello, launchables: {web: {command: [serve]}}}\n"
GOOD = """\
replicas: 2
update:
  analysis:
  - name: errors
    prometheus: {url: 'http://prometheus:9090', query: 'sum(rate(errors[1m]))', condition: '< 0.01'}
    failure_limit: 2
  - name: answers
    http: {url: 'https://web.example.com:8443/healthz?full=1', status: 204}
    interval: 5
  - name: smoke
    command: smoke-test
    timeout: 120
"""
NEW = RCSpec(id="hello", manifest="", replicas_desired=0)


def spec_of(text: str, before: RCSpec = NEW) -> RCSpec:
    [document] = rc_apply.load("f", (HEAD + text).encode())
    return rc_apply.changed(document, before)


def test_three_kinds_are_read_and_shown_as_written() -> None:
    """What `rc get` prints reads back to the same; a field that is left out keeps its value, an empty list has none."""
    spec = spec_of(GOOD)
    assert spec.policy.analysis == (
        Analysis(
            name="errors",
            prometheus=PrometheusAnalysis(
                url="http://prometheus:9090", query="sum(rate(errors[1m]))", condition="< 0.01"
            ),
            failure_limit=2,
        ),
        Analysis(
            name="answers",
            http=HttpAnalysis(url="https://web.example.com:8443/healthz?full=1", status=204),
            interval=5.0,
        ),
        Analysis(name="smoke", command="smoke-test", timeout=120.0),
    )
    shown = rc_apply.as_yaml(spec, b'{"id":"hello","launchables":{"web":{"command":["serve"]}}}')
    [again] = rc_apply.load("again", shown.encode())
    assert rc_apply.changed(again, spec) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=RCSpec) == spec
    assert spec_of("update: {soak: 1}", spec).policy.analysis == spec.policy.analysis
    assert spec_of("update: {analysis: []}", spec).policy.analysis == ()


def one(text: str) -> str:
    return f"update:\n  analysis:\n  - {text}\n"


PROMETHEUS = "name: a, prometheus: {url: 'http://p', query: up, condition: '> 0'}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (one("{name: a}"), "f:4: update.analysis.0: has nothing to run; give one of http, prometheus and command"),
        (one("{name: a, command: b, http: {url: 'http://p'}}"), "f:4: update.analysis.0: has http and command; give"),
        (one("{command: b}"), "f:4: update.analysis.0: the field name is missing"),
        (one("{name: A b, command: b}"), "f:4: update.analysis.0.name: 'A b' is not a DNS label"),
        (
            one("{name: a, command: b, intervall: 5}"),
            "update.analysis.0.intervall: unknown field; did you mean interval",
        ),
        (
            one("{name: a, http: {uri: 'http://p'}}"),
            "f:4: update.analysis.0.http.uri: unknown field; did you mean url?",
        ),
        (one("{name: a, http: {status: 200}}"), "f:4: update.analysis.0.http: the field url is missing"),
        (one("{name: a, http: {url: 'http://p', status: 1000}}"), "http.status: 1000 is not a final status"),
        (one("{name: a, http: {url: 'http://p', status: ok}}"), "http.status: expected a whole number, got text"),
        (one("{name: a, command: b, interval: 30s}"), "update.analysis.0.interval: expected a number, got text"),
        (one("{name: a, command: b, interval: 0.5}"), "interval: 0.5 s must be between 1 and 3600 s"),
        (one("{name: a, command: b, interval: .nan}"), "update.analysis.0.interval: "),
        (one("{name: a, command: b, timeout: 301}"), "timeout: 301 s must be between 0.1 and 300 s"),
        (one("{name: a, command: b, failure_limit: -1}"), "update.analysis.0.failure_limit: "),
        (one("{name: a, command: b, failure_limit: 101}"), "failure_limit: 101 is more than 100; lower it"),
        (one("{name: a, command: /bin/sh}"), "command: '/bin/sh' is not the name of a command; farms list them in"),
        (one("{name: a, command: [sh, -c, x]}"), "update.analysis.0.command: expected text, got a list"),
        (one("{name: a, prometheus: {url: 'http://p', query: up}}"), "prometheus: the field condition is missing"),
        (one("{name: a, http: {url: 'ftp://p/x'}}"), "http.url: 'ftp://p/x' is not a URL that can be called"),
        (one("{name: a, http: {url: 'http://u:p@p/x'}}"), "http.url: has credentials, which everyone who can read"),
        (one("{name: a, http: {url: 'http://p:99999'}}"), "http.url: 99999 is not a port"),
        (one("{name: a, http: {url: 'http://p/#x'}}"), "http.url: 'http://p/#x' is not a URL"),
        (one("{name: a, http: {url: 'http://p /x'}}"), "http.url: 'http://p /x' is not a URL"),
        (one("{name: a, http: {url: 'http:///x'}}"), "http.url: 'http:///x' is not a URL"),
        (one("{" + PROMETHEUS.replace("//p", "//p/x?a=b") + "}"), "prometheus.url: give Prometheus's address without"),
        (one("{" + PROMETHEUS.replace("up", "' '") + "}"), "prometheus.query: give a query of at most 4000 characters"),
        (one("{" + PROMETHEUS.replace("> 0", "=> 0") + "}"), "prometheus.condition: '=> 0' is not a comparison with a"),
        (one("{" + PROMETHEUS.replace("> 0", "> 1%") + "}"), "prometheus.condition: '> 1%' is not a comparison with a"),
        (
            one("{name: a, command: b}\n  - {name: a, command: c}"),
            "f:5: update.analysis.1.name: 'a' is given twice; choose another name",
        ),
        (
            one("{name: a, command: b}\n  - {name: b, command: c, interval: x}"),
            "f:5: update.analysis.1.interval: expected a number, got text",
        ),
        (
            "update: {analysis: [" + ", ".join(f"{{name: a{n}, command: b}}" for n in range(MOST + 1)) + "]}",
            f"update.analysis: has {MOST + 1} entries; at most {MOST} are allowed",
        ),
        ("update: {analysis: {name: a}}", "f:2: update.analysis: expected a list, got a mapping"),
        ("update: {analysis: [a]}", "f:2: update.analysis.0: expected a mapping, got text"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(BadFile) as error:
        rc_apply.load("f", (HEAD + text).encode())
    assert complaint in str(error.value)
    assert str(error.value).count("\n") == 0


def test_a_policy_of_another_client_is_checked_as_well() -> None:
    with pytest.raises(BadInput, match=r"update\.analysis\.0: has nothing to run"):
        check_update(UpdatePolicy(analysis=(Analysis(name="a"),)))
    many = tuple(Analysis(name=f"a{number}", command="b") for number in range(MOST + 1))
    with pytest.raises(BadInput, match=r"update\.analysis: has 9 entries"):
        check_update(UpdatePolicy(analysis=many))


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("< 0.01", 0.0, True),
        ("<0.01", 0.01, False),
        ("<= 1e-2", 0.01, True),
        (">= -3", -3.0, True),
        (" > 5 ", 5.0, False),
        ("== 0", -0.0, True),
        ("!= 0", math.inf, True),
    ],
)
def test_a_condition_is_a_comparison_with_a_number(text: str, value: float, holds: bool) -> None:
    condition = condition_of(text)
    assert condition is not None
    assert condition.holds(value) is holds


@pytest.mark.parametrize(
    "text", ["", "0.01", "< x", "< 0x1", "< inf", "< nan", "< 1e999", "~ 1", "< 1 < 2", "< 1\n", "<"]
)
def test_anything_else_is_no_condition(text: str) -> None:
    assert condition_of(text) is None


@pytest.mark.parametrize(
    ("host", "port", "patterns", "allowed"),
    [
        ("p", 80, (), True),
        ("p", 80, ("p",), True),
        ("P", 80, ("p:80",), True),
        ("p", 81, ("p:80",), False),
        ("a.example.com", 1, ("*.example.com",), True),
        ("example.com", 1, ("*.example.com",), False),
        ("a.example.com.evil", 1, ("*.example.com",), False),
        ("axexample.com", 1, ("*.example.com",), False),
        ("::1", 9, ("[::1]:9",), True),
        ("::1", 9, ("[::2]",), False),
    ],
)
def test_places_are_matched_as_a_whole(host: str, port: int, patterns: tuple[str, ...], allowed: bool) -> None:
    assert is_allowed(host, port, patterns) is allowed


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
texts = st.sampled_from(["http://p:9090", "https://[::1]/x", "http://a@b", "< 0.01", "a", "", "sum(up)", "> 1e99999"])
values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)
entries = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "c d"])},
    optional={
        "http": st.fixed_dictionaries({}, optional={"url": texts | values, "status": values}) | values,
        "prometheus": st.fixed_dictionaries(
            {}, optional={"url": texts | values, "query": texts | values, "condition": texts | values}
        )
        | values,
        "command": texts | values,
        "interval": st.floats() | values,
        "timeout": st.floats() | values,
        "failure_limit": st.integers() | values,
        "other": values,
    },
)


@given(st.lists(entries | values, max_size=MOST + 1) | values)
def test_no_document_raises_anything_but_the_input_error(analysis: Any) -> None:
    """And what passes is valid throughout."""
    import yaml

    fields = {"replicas": 1, "update": {"analysis": analysis}}
    text = HEAD + yaml.safe_dump(fields, allow_unicode=True)
    try:
        spec = spec_of(text)
    except BadInput:
        return
    assert problem_of_all(spec.policy.analysis) is None
    for each in spec.policy.analysis:
        assert INTERVAL[0] <= each.interval <= INTERVAL[1]
        assert TIMEOUT[0] <= each.timeout <= TIMEOUT[1]
        assert bool(each.http) + bool(each.prometheus) + bool(each.command) == 1
        url = each.http.url if each.http else each.prometheus.url if each.prometheus else ""
        assert "@" not in url
        assert len(url) <= LONGEST_URL
        assert len(each.prometheus.query if each.prometheus else "") <= LONGEST_QUERY


ASKED = PrometheusAnalysis(url="http://p", query="up", condition="< 1")
answers = st.fixed_dictionaries(
    {"status": st.just("success")},
    optional={
        "data": st.fixed_dictionaries(
            {"resultType": st.sampled_from(["vector", "scalar", "matrix"]), "result": values | st.lists(values)}
        )
        | values
    },
)


@given(st.integers(0, 999), st.binary(max_size=50) | answers.map(msgspec.json.encode) | values.map(msgspec.json.encode))
def test_no_answer_of_a_server_raises_anything(status: int, body: bytes) -> None:
    """Its outcome is an error then, and what is kept of it is short."""
    measured = of_prometheus(ASKED, status, body)
    assert len(measured.value) < 60
    if status != 200:
        assert measured.outcome == "error"


@given(st.floats())
def test_every_number_has_an_outcome(value: float) -> None:
    text = struct.unpack("d", struct.pack("d", value))[0]
    body = {"status": "success", "data": {"resultType": "scalar", "result": [0, str(text)]}}
    outcome = of_prometheus(ASKED, 200, msgspec.json.encode(body)).outcome
    assert outcome == ("no_data" if math.isnan(value) else "success" if value < 1 else "failure")
