"""The records of cached results: where a result is kept, and who is about to produce it.

Both stand in one key, so that a result and the end of its reservation are one write.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from store.schema.records import Labels, Quantity, StoredRecord


class CachedResult(StoredRecord, frozen=True, kw_only=True):
    """A result. `outputs`: the reference of the document in the data store. `sha256` and `size` (bytes) are the
    document's. `metadata`: where the result comes from, for people."""

    outputs: str
    sha256: str
    size: Quantity
    created_at: str
    metadata: Labels = {}


class Reservation(StoredRecord, frozen=True):
    """The right to produce the result. `owner`: `<execution>/<attempt>`. `until`: seconds since the epoch; after that
    another owner may take it."""

    owner: str
    until: Annotated[float, msgspec.Meta(ge=0, le=253402300799.0)]


class CatalogEntry(StoredRecord, frozen=True, kw_only=True):
    """`catalog/<digest>`: `task` and `cache_version` are parts of what the digest identifies, for people."""

    task: str = ""
    cache_version: str = ""
    result: CachedResult | None = None
    reservation: Reservation | None = None
