"""Pages off the wire, whose items are decoded one by one."""

from __future__ import annotations

import pytest

from store.kube.api.errors import (
    MAX_RETRY_AFTER,
    BadRequest,
    KubeError,
    ServerError,
    Unreachable,
    Unreadable,
    is_too_large_resource_version,
)
from store.kube.api.objects import MalformedObject
from store.kube.client import wire
from tests.support.hostile import nested


def page(items: bytes) -> bytes:
    return b'{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"more"},"items":' + items + b"}"


def test_a_page_holds_its_items_as_they_are() -> None:
    """They behave as a list of objects, unknown fields and all."""
    items = wire.decode_page(page(b'[{"metadata":{"name":"a"},"x":[null]},{"y":12345678901234567890123},3]')).items
    expected = [{"metadata": {"name": "a"}, "x": [None]}, {"y": 12345678901234567890123}, 3]
    assert list(items) == items == expected
    assert items != expected[:2]
    assert (len(items), items[0], items[-1], items[1:]) == (3, expected[0], 3, expected[1:])


@pytest.mark.parametrize("items", [b"[]", b"null"])
def test_a_page_may_be_empty(items: bytes) -> None:
    """Go writes an empty list as null, too."""
    decoded = wire.decode_page(page(items))
    assert (decoded.items, decoded.resource_version, decoded.continue_token) == ([], "7", "more")


@pytest.mark.parametrize("item", [b'{"a":tru}', b'{"a" 1}'])
def test_an_item_that_is_no_json_is_no_answer(item: bytes) -> None:
    """An item that is not JSON raises, at once or when it is read, the error for a server that is no API server."""
    with pytest.raises(Unreachable, match="not the Kubernetes API"):
        list(wire.decode_page(page(b"[%b]" % item)).items)


def item(name: str, **fields: bytes) -> bytes:
    """One object of a list, with these texts as fields."""
    metadata = b'{"name":"%b","namespace":"ns","uid":"uid-%b","resourceVersion":"5"%b}' % (
        name.encode(),
        name.encode(),
        b',"managedFields":%b' % fields.pop("managed") if "managed" in fields else b"",
    )
    return b'{"metadata":%b%b}' % (metadata, b"".join(b',"%b":%b' % (key.encode(), fields[key]) for key in fields))


IDENTITY = {"name": "bad", "namespace": "ns", "uid": "uid-bad", "resourceVersion": "5"}
DEEP_FIELDS = b'[{"fieldsV1":%b}]' % nested()


@pytest.mark.parametrize(
    "bad",
    [item("bad", spec=nested(levels)) for levels in (200, 500, 950, 1_500, 9_999)]
    + [item("bad", spec=b'{"x":"}]\\"{[","y":%b}' % nested(), status=b"[" * 2_000 + b"]" * 2_000)]
    + [item("bad", managed=DEEP_FIELDS, status=nested()), item("bad", spec=b'"\xff"')],
    ids=range(8),
)
def test_an_item_that_cannot_be_decoded_is_known_by_its_key(bad: bytes) -> None:
    """On a page, in a watch and alone. Nothing of it but its identity is shown, and its neighbours are whole."""
    first, found, last = wire.decode_page(page(b"[%b,%b,%b]" % (item("a"), bad, item("b")))).items
    assert [first["metadata"]["name"], last["metadata"]["name"]] == ["a", "b"]
    event = wire.decode_event(b'{"type":"MODIFIED","object":%b}' % bad)
    assert event.type == "MODIFIED"
    for seen in (found, event.object):
        assert isinstance(seen, MalformedObject)
        assert seen == {"metadata": IDENTITY}
        assert "nested more than 200 levels" in seen.reason or "utf-8" in seen.reason
    with pytest.raises(Unreadable, match=r"can't be understood: (nested more than 200|.*utf-8)"):
        wire.decode_object(bad)


def test_managed_fields_cannot_hide_an_object() -> None:
    """No controller reads them: an object that is deep there alone is like any other, without them."""
    good = item("bad", managed=DEEP_FIELDS, spec=b'{"a":[1]}')
    whole = {"metadata": IDENTITY, "spec": {"a": [1]}}
    assert wire.decode_page(page(b"[%b]" % good)).items == [whole]
    assert wire.decode_event(b'{"type":"ADDED","object":%b}' % good).object == whole
    assert wire.decode_object(good) == whole


@pytest.mark.parametrize("line", [b"<html>", b'{"type":"ADDED"}', b'{"type":', nested(), b"\xff", b"[" * 70_000])
def test_what_is_no_event_is_an_error_of_its_own(line: bytes) -> None:
    """So the reflector lists, which survives any object, instead of asking for the same event for ever."""
    with pytest.raises(Unreadable, match="no event of a watch"):
        wire.decode_event(line)


@pytest.mark.parametrize(
    "status",
    [
        b'{"kind":"Status","code":"x","details":[1]}',
        b'{"kind":"Status","details":{"retryAfterSeconds":"soon","causes":{"a":1}}}',
        b'{"kind":"Status","details":{"causes":[7,{"reason":{}}],"retryAfterSeconds":1e300}}',
        b'{"kind":"Status","details":%b}' % nested(),
    ],
)
def test_a_strange_status_is_an_error_like_others(status: bytes) -> None:
    """The wait is bounded, whatever the fields hold."""
    error = wire.error_of("GET /x", 503, status, "9" * 400)
    assert isinstance(error, ServerError)
    assert not is_too_large_resource_version(error)
    assert error.retry_after == MAX_RETRY_AFTER
    with pytest.raises(KubeError):
        wire.decode_event(b'{"type":"ERROR","object":%b}' % status)


def test_what_cannot_be_written_is_refused_before_it_is_sent() -> None:
    """A body with user input that is nested too deep, or is not valid Unicode."""
    deep: object = 1
    for _ in range(5_000):
        deep = [deep]
    for body in ({"a": deep}, {"a": "\ud800"}):
        with pytest.raises(BadRequest, match="can't be written as JSON"):
            wire.encode(body)
