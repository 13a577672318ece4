"""Statuses too large for etcd: the JSON of the task roles, gzipped. Source: frameworkcontroller's large Frameworks."""

from __future__ import annotations

import gzip
import zlib

import msgspec

from controllers.framework.types import TaskRoleStatus
from store.decoding import from_json

MAX_ROLES = 16 * 1024 * 1024
"""Bytes of JSON that are read at most: 10,000 tasks with long diagnostics take half of it, and decoded it takes four
times as much memory, which any tenant can ask for with some 50 KB."""

_decoder = msgspec.json.Decoder(tuple[TaskRoleStatus, ...])


def compress(raw: bytes) -> bytes:
    """The same bytes for the same JSON: no time stamp, so that an unchanged status stays unchanged."""
    return gzip.compress(raw, compresslevel=6, mtime=0)


def decompress(compressed: bytes) -> tuple[TaskRoleStatus, ...]:
    """Raises `ValueError` for what is not gzip, too large, or not the statuses of task roles."""
    return from_json(_decoder, inflate(compressed))


def inflate(compressed: bytes) -> bytes:
    """The JSON in it. Raises `ValueError` for what is not gzip, or too large."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: a gzip header
    try:
        raw = stream.decompress(compressed, MAX_ROLES)
    except zlib.error as error:
        raise ValueError(f"not valid gzip: {error}") from error
    if stream.unconsumed_tail:
        raise ValueError(f"more than {MAX_ROLES} bytes when decompressed")
    if not stream.eof:
        raise ValueError("the compressed data ends early")
    return raw
