"""Reading manifests: strict, and harmless whatever the bytes are."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.manifest import MAX_MANIFEST_BYTES, BadManifest, parse

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
