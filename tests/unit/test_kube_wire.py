"""Pages off the wire, whose items are decoded one by one."""

from __future__ import annotations

import pytest

from store.kube import wire
from store.kube.errors import Unreachable


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


@pytest.mark.parametrize("item", [b'{"a":tru}', b'{"a" 1}', b'{"a":"\xff"}'])
def test_an_item_that_is_no_json_is_no_answer(item: bytes) -> None:
    """Whether it shows at once or when the item is looked at, it is told as what the server did not say."""
    with pytest.raises(Unreachable, match="not the Kubernetes API"):
        list(wire.decode_page(page(b"[%b]" % item)).items)
