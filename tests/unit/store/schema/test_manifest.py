"""Reading manifests: strict, and harmless whatever the bytes are."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.schema.manifest import MAX_MANIFEST_BYTES, BadManifest, from_mapping, parse, problem_of_url

HEAD = b"id: web\nlaunchables: {main: {command: [sleep]}}\n"


def test_yaml_and_json_are_read() -> None:
    """Both notations give the same manifest."""
    assert parse(HEAD) == parse(b'{"id":"web","launchables":{"main":{"command":["sleep"]}}}')


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00\x01",
        b"- a list",
        HEAD + b"config: {day: 2001-99-99}",
        HEAD + b"config: {size: !!float many}",
        HEAD + b"config: {[1]: 2}",
        HEAD + b"config: *nowhere",
        HEAD + b"surprise: 1",
        b"id: web\nlaunchables: {main: {command: [sleep], stop_timeout: .nan}}",
        HEAD + b"health: {interval: .nan}",
        HEAD + b"health: {timeout: .inf}",
        HEAD + b"config: {a: " + b"[" * 60_000 + b"]" * 60_000 + b"}",
        HEAD + b"config:\n  a:\n    " + b"- " * 100_000 + b"x",
        b'{"id":"web","launchables":{"main":{"command":["x"]}},"config":{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}}",
        b"x" * (MAX_MANIFEST_BYTES + 1),
    ],
)
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    """Whatever is wrong with the bytes is one kind of error; nothing of it reaches the farm's loop, or its stack."""
    with pytest.raises(BadManifest):
        parse(raw)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    """Random bytes are a manifest or a BadManifest."""
    with contextlib.suppress(BadManifest):
        parse(raw)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///tmp/a%00b", "NUL"),
        ("file:///tmp/a\x1bb", "control characters"),
        ("file:///my file", "write %20"),
        ("http://[x", "its host or port can't be read"),
        ("http://host:99999/a", "its host or port can't be read"),
        ("https:///a?X-Amz-Signature=SECRET", "no host to ask: write https://HOST/PATH"),
        ("http://:80/a", "no host to ask"),
        ("http://us^er/a", "no host to ask"),
        ("ftp://user:SECRET@host/a", "nothing can be fetched from there"),
        ("/srv/a.tar", "nothing can be fetched from there"),
        ("", "nothing can be fetched from there"),
        ("file://host/a", "not a file of this machine"),
        ("file:///srv/", "not a file of this machine"),
        ("file:srv", "not a file of this machine"),
        ("https://host/" + "a" * 5000, "over 4096 characters"),
    ],
)
def test_a_url_that_can_not_be_fetched_is_refused(url: str, problem: str) -> None:
    """An artifact's URL is checked before it reaches any node; the message names the field and shows no secret."""
    fields = {"command": ["run"], "artifact": {"url": url, "sha256": "0" * 64}}
    with pytest.raises(BadManifest, match=r"^launchables.web.artifact.url: ") as refused:
        from_mapping({"id": "web", "launchables": {"web": fields}})
    assert problem in str(refused.value)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["https://host/a.tar?x=y", "http://[::1]:80/a", "http://user:pw@host:8080", "file:///srv/a%20b", "HTTP://H/a"],
)
def test_usual_urls_are_accepted(url: str) -> None:
    """Queries, ports, credentials, IPv6 addresses and escapes are fine."""
    assert problem_of_url(url) == ""


@given(st.text(max_size=60) | st.text(alphabet="http:/s@[]%fileab0.?#", max_size=40).map("http://".__add__))
def test_no_url_raises(url: str) -> None:
    """Whatever is written as a URL has a problem or none."""
    assert isinstance(problem_of_url(url), str)
