"""The records as they are read: what is absent, wrong or from the future."""

from __future__ import annotations

import pytest

from store.kv.protocol import BadRecord
from store.schema.records import RCSpec, decode

KEY = "rcfarm/rcs/00/web/spec"


def test_a_count_that_is_absent_is_an_error() -> None:
    """A spec without `replicas_desired` is refused, by key and field; it is never taken for zero."""
    with pytest.raises(BadRecord, match=r"rcs/00/web/spec.*replicas_desired"):
        decode(RCSpec, KEY, b'{"id":"web","manifest":"m"}')


@pytest.mark.parametrize(("written", "count"), [(b"0", 0), (b"1000", 1000), (b'2,"surge":{"max":1}', 2)])
def test_a_count_that_is_written_is_taken(written: bytes, count: int) -> None:
    """An explicit zero is as good as any other count, and a field of a later version does no harm."""
    record = decode(RCSpec, KEY, b'{"id":"web","manifest":"m","replicas_desired":%b}' % written)
    assert record.replicas_desired == count
