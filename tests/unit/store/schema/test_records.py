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


@pytest.mark.parametrize("written", [0, 1, 1000])
def test_a_count_that_is_written_is_taken(written: int) -> None:
    """An explicit zero is as good as any other count."""
    record = decode(RCSpec, KEY, b'{"id":"web","manifest":"m","replicas_desired":%d}' % written)
    assert record.replicas_desired == written


def test_fields_of_a_later_version_do_no_harm() -> None:
    """A field that this version does not know leaves the others readable."""
    record = decode(RCSpec, KEY, b'{"id":"web","manifest":"m","replicas_desired":2,"surge":{"max":1}}')
    assert record.replicas_desired == 2
