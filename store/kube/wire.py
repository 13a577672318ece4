"""What goes over the wire, without the wire: queries and bodies out; objects, pages, events and errors in. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, overload
from urllib.parse import urlencode

import msgspec

from store.kube.api import Page, PatchType, Propagation, WatchEvent
from store.kube.errors import KubeError, Unreachable, error_from_status
from store.kube.objects import Object

T = TypeVar("T")

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


_ANYTHING = msgspec.json.Decoder()
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_LIST = msgspec.json.Decoder(_List)
_EVENT = msgspec.json.Decoder(_Event)


class LazyObjects(Sequence[Object]):
    """The items of a page, each decoded when it is asked for: decoded, a page takes five times the memory of its text.

    Asking raises `Unreachable` for an item that is no JSON.
    """

    __hash__ = None  # type: ignore[assignment]  # it compares as a list does

    def __init__(self, texts: Sequence[msgspec.Raw]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Object: ...
    @overload
    def __getitem__(self, index: slice) -> LazyObjects: ...
    def __getitem__(self, index: int | slice) -> Object | LazyObjects:
        if isinstance(index, slice):
            return LazyObjects(self._texts[index])
        return cast(Object, _decode(_ANYTHING, self._texts[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class LineSplitter:
    """Cuts a stream into lines. A line may be of any length: nothing is searched twice."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their ends."""
        *lines, rest = chunk.split(b"\n")
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces.clear()
        if rest:
            self._pieces.append(rest)
        return lines

    @property
    def is_inside_line(self) -> bool:
        """Whether the stream may not end here."""
        return bool(self._pieces)


def query(**parameters: str | int | float | bool | None) -> str:
    """A query string of the parameters that are not empty."""
    return urlencode({name: _text(value) for name, value in parameters.items() if value})


def encode(body: Object | Any) -> bytes:
    return msgspec.json.encode(body)


def delete_options(uid: str, grace_period: int | None, propagation: Propagation | None) -> bytes | None:
    """The body of a DELETE, or None when there is nothing to say."""
    options: Object = {}
    if uid:
        options["preconditions"] = {"uid": uid}
    if grace_period is not None:
        options["gracePeriodSeconds"] = grace_period
    if propagation is not None:
        options["propagationPolicy"] = propagation
    return encode(options) if options else None


def decode_object(body: bytes) -> Object:
    return _decode(_OBJECT, body)


def decode_page(body: bytes) -> Page:
    answer = _decode(_LIST, body)
    meta = answer.metadata
    return Page(LazyObjects(answer.items or ()), meta.resource_version, meta.continue_token, meta.remaining_item_count)


def decode_event(line: bytes) -> WatchEvent:
    """One line of a watch. Raises the typed error of an ERROR event."""
    event = _decode(_EVENT, line)
    if event.type == "ERROR":
        raise error_from_status(event.object)
    return WatchEvent(event.type, event.object)


def error_of(call: str, status: int, body: bytes, retry_after: str | None = None) -> KubeError:
    """The error for an answer that is no success. `call`: how a message names it, for an answer that is no Status, as
    of a proxy. `retry_after`: the header; only seconds are understood."""
    wait = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else None
    try:
        answer = _OBJECT.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        answer = {}
    if answer.get("kind") != "Status":
        text = body[:_EXCERPT].decode(errors="replace").strip() or "no reason"
        answer = {"message": f"{call}: HTTP {status}: {text}"}
    return error_from_status({**answer, "code": status}, retry_after=wait)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        excerpt = bytes(body)[:_EXCERPT].decode(errors="replace").strip()
        raise Unreachable(f"what answers is not the Kubernetes API: {error} in: {excerpt}") from error


def _text(value: str | int | float | bool) -> str:
    return "true" if value is True else f"{value}"
