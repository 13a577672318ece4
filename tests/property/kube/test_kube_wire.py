"""Properties of the Kubernetes client's handling of bytes."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.kube.api.errors import Unreachable
from store.kube.client.client import events_in


@given(
    names=st.lists(st.text(max_size=40)),
    tail=st.sampled_from([b"", b"\n", b"{", b'{"type":"ADDED"']),
    cuts=st.lists(st.integers(min_value=1, max_value=2000)),
)
def test_events_do_not_depend_on_where_a_stream_is_cut(names: list[str], tail: bytes, cuts: list[int]) -> None:
    """Whatever the chunks, the events are those of the stream's lines, and an end inside a line is noticed."""
    content = b"".join(json.dumps({"type": "ADDED", "object": {"x": name}}).encode() + b"\n" for name in names) + tail
    bounds = sorted({0, *(min(cut, len(content)) for cut in cuts), len(content)})
    chunks = iter([content[start:end] for start, end in itertools.pairwise(bounds)])
    seen: list[str] = []

    async def chunk() -> bytes:
        return next(chunks, b"")

    async def read() -> None:
        async for event in events_in(chunk):
            seen.append(event.object["x"])  # noqa: PERF401 (each one is seen before the error)

    if tail.strip():
        with pytest.raises(Unreachable, match="inside an event"):
            asyncio.run(read())
    else:
        asyncio.run(read())
    assert seen == names
