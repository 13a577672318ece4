"""Properties of the Kubernetes client's handling of bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from store.kube.client.wire import LineSplitter


@given(
    lines=st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line)),
    tail=st.binary(max_size=10).filter(lambda tail: b"\n" not in tail),
    cuts=st.lists(st.integers(min_value=0, max_value=400)),
)
def test_lines_do_not_depend_on_where_a_stream_is_cut(lines: list[bytes], tail: bytes, cuts: list[int]) -> None:
    """Whatever the chunks, the lines are those of the stream, and the rest at the end is known."""
    content = b"".join(line + b"\n" for line in lines) + tail
    bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    splitter = LineSplitter()
    seen = [line for start, end in itertools.pairwise(bounds) for line in splitter.feed(content[start:end])]
    assert seen == lines
    assert splitter.is_inside_line == bool(tail)
