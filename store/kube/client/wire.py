"""The wire format: encodes queries and bodies; decodes objects, pages, events and errors. Pure.

An API server takes objects of any shape from its clients, nested to ten thousand levels. An undecodable object becomes
a `MalformedObject` with its identity, and does not affect its neighbours on a page or in a watch.
`metadata.managedFields` that is nested too deep is left out, because no controller reads it; otherwise a tenant could
hide a running pod by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, overload
from urllib.parse import urlencode

import msgspec

from store.decoding import CUT, MAX_DEPTH, Undecodable, cut_below, from_json
from store.kube.api.errors import MAX_RETRY_AFTER, BadRequest, KubeError, Unreachable, Unreadable, error_from_status
from store.kube.api.objects import MalformedObject, Object
from store.kube.api.protocol import Page, PatchType, Propagation, WatchEvent

JSON = "application/json"
PATCHES: Mapping[PatchType, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}
_EXCERPT = 200  # characters of an answer that makes no sense


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_token: str = msgspec.field(default="", name="continue")
    remaining_item_count: int | None = None


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct, gc=False):
    type: str
    object: dict[str, Any]


class _RawEvent(msgspec.Struct, gc=False):
    type: str
    object: msgspec.Raw


_ANYTHING = msgspec.json.Decoder()
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_LIST = msgspec.json.Decoder(_List)
_EVENT = msgspec.json.Decoder(_Event)
_RAW_EVENT = msgspec.json.Decoder(_RawEvent)


class LazyObjects(Sequence[Object]):
    """The items of a page, each decoded on demand: a decoded page takes five times the memory of its text.

    An item that can't be decoded is a `MalformedObject`. `cut`: the page was too deep, and was cut (`cut_below`).
    """

    __hash__ = None  # type: ignore[assignment]  # it compares as a list does

    def __init__(self, texts: Sequence[msgspec.Raw], *, cut: bool = False) -> None:
        self._texts, self._cut = texts, cut

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Object: ...
    @overload
    def __getitem__(self, index: slice) -> LazyObjects: ...
    def __getitem__(self, index: int | slice) -> Object | LazyObjects:
        if isinstance(index, slice):
            return LazyObjects(self._texts[index], cut=self._cut)
        return _item(self._texts[index], cut=self._cut)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class LineSplitter:
    """Cuts a stream into lines of any length: nothing is searched twice."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that `chunk` completes, without their ends."""
        *lines, rest = chunk.split(b"\n")
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces.clear()
        if rest:
            self._pieces.append(rest)
        return lines

    @property
    def is_inside_line(self) -> bool:
        """Return whether the stream is inside a line, where it must not end."""
        return bool(self._pieces)


def query(**parameters: str | int | float | bool | None) -> str:
    """Return a query string of the parameters that are not empty."""
    return urlencode({name: "true" if value is True else f"{value}" for name, value in parameters.items() if value})


def encode(body: Object | Any) -> bytes:
    """Return the body of a request. Raises `BadRequest` for what can't be written as JSON."""
    try:
        return msgspec.json.encode(body)
    except Exception as error:
        raise BadRequest(f"the object can't be written as JSON: {error}") from error


def delete_options(uid: str, grace_period: int | None, propagation: Propagation | None) -> bytes | None:
    """Return the body of a DELETE, or None when there are no options."""
    options: Object = {}
    if uid:
        options["preconditions"] = {"uid": uid}
    if grace_period is not None:
        options["gracePeriodSeconds"] = grace_period
    if propagation is not None:
        options["propagationPolicy"] = propagation
    return encode(options) if options else None


def decode_object(body: bytes) -> Object:
    """Return the object of an answer. Raises `Unreadable` for one that is nested too deep."""
    try:
        return from_json(_OBJECT, body)
    except Undecodable as error:
        found = _salvaged(body, error)
    if isinstance(found, MalformedObject):
        if found["metadata"]:
            raise Unreadable(f"the object can't be understood: {found.reason}")
        raise _stranger(body, found.reason)
    return found


def decode_page(body: bytes) -> Page:
    """Return a page, whatever its items are. Raises `Unreachable` for an answer that is not a list."""
    cut = False
    try:
        answer = from_json(_LIST, body)
    except Undecodable:
        cut = True
        try:
            answer = from_json(_LIST, cut_below(body, MAX_DEPTH + 2))  # the list and its items are two levels more
        except Undecodable as error:
            raise _stranger(body, str(error)) from error
    meta, items = answer.metadata, LazyObjects(answer.items or (), cut=cut)
    return Page(items, meta.resource_version, meta.continue_token, meta.remaining_item_count)


def decode_event(line: bytes) -> WatchEvent:
    """Return the event in one line of a watch. Raises the typed error of an ERROR event, and `Unreadable` for a line
    that is not an event."""
    try:
        event = from_json(_EVENT, line)
    except Undecodable as error:
        return _salvaged_event(line, error)
    if event.type == "ERROR":
        raise error_from_status(event.object)
    return WatchEvent(event.type, event.object)


def error_of(call: str, status: int, body: bytes, retry_after: str | None = None) -> KubeError:
    """Return the error for an unsuccessful answer. `call`: its name in messages, for an answer that is not a Status,
    such as a proxy's. `retry_after`: the header; only seconds are supported."""
    wait = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else None
    try:
        answer = from_json(_OBJECT, body)
    except Undecodable:
        answer = {}
    if answer.get("kind") != "Status":
        text = body[:_EXCERPT].decode(errors="replace").strip() or "no reason"
        answer = {"message": f"{call}: HTTP {status}: {text}"}
    return error_from_status(
        {**answer, "code": status}, retry_after=None if wait is None else min(wait, MAX_RETRY_AFTER)
    )


def _item(text: msgspec.Raw, *, cut: bool) -> Object:
    """Return the object in a text; the reader refuses a value that is not an object."""
    if cut and CUT in bytes(text):
        return _salvaged(bytes(text), Undecodable(f"nested more than {MAX_DEPTH} levels deep"))
    try:
        return cast(Object, from_json(_ANYTHING, text))
    except Undecodable as error:
        return _salvaged(bytes(text), error)


def _salvaged(text: bytes, error: Undecodable) -> Object:
    """Return the decodable part of an object: all but its managed fields, if only they are too deep, else a
    `MalformedObject`."""
    legible = text.decode(errors="replace").encode()
    try:
        shallow = from_json(_ANYTHING, cut_below(legible))
    except Undecodable:
        return MalformedObject(None, str(error))
    metadata = shallow.get("metadata") if isinstance(shallow, dict) else None
    has_fields = isinstance(metadata, dict) and metadata.pop("managedFields", None) is not None
    if has_fields and legible == text and CUT not in encode(shallow):
        return cast(Object, shallow)
    return MalformedObject(shallow, str(error))


def _salvaged_event(line: bytes, error: Undecodable) -> WatchEvent:
    try:
        event = from_json(_RAW_EVENT, cut_below(line, MAX_DEPTH + 1))  # the event is one level more
    except Undecodable:
        raise Unreadable(f"what came is no event of a watch: {error} in: {_excerpt(line)}") from error
    found = _item(event.object, cut=True)
    if event.type == "ERROR":
        raise error_from_status(found)
    return WatchEvent(event.type, found)


def _stranger(body: bytes, reason: str) -> Unreachable:
    return Unreachable(f"what answers is not the Kubernetes API: {reason} in: {_excerpt(body)}")


def _excerpt(body: bytes) -> str:
    return body[:_EXCERPT].decode(errors="replace").strip()
