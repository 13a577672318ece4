"""The cache of an informer: objects at rest, and their indexes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from store.kube.api.objects import Object, key_of, namespace_of
from store.kube.informer.informer import ObjectCache, by_controller, by_label


def pod(name: str, *, version: int = 1, namespace: str = "team", **metadata: Any) -> Object:
    identity = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**identity, **metadata}, "spec": {"big": 2**70, "text": "ä\n"}, "unknown": [None, True, 1.5]}


def owned(uid: str, *, controller: bool = True) -> list[Object]:
    return [{"uid": "other", "name": "other"}, {"uid": uid, "name": "job", "controller": controller}]


def by_namespace(obj: Object) -> tuple[str]:
    return (namespace_of(obj),)


def names(objects: Iterable[Object]) -> list[str]:
    return [obj["metadata"]["name"] for obj in objects]


def test_what_is_put_comes_back_whole() -> None:
    """Unknown fields, numbers of any size, and nulls survive the rest as text."""
    cache = ObjectCache({})
    cache.put("team/a", pod("a"))
    assert cache.get("team/a") == pod("a")
    assert cache.items() == [pod("a")]
    assert cache.get("team/b") is None
    assert (list(cache), len(cache)) == (["team/a"], 1)


def test_a_reader_cannot_change_the_cache() -> None:
    """Returned objects and objects that were put in belong to the caller."""
    cache = ObjectCache({"namespace": by_namespace})
    obj = pod("a")
    cache.put("team/a", obj)
    for found in (obj, cache.get("team/a"), *cache.items(), *cache.by_index("namespace", "team")):
        assert found is not None
        found["spec"].clear()
    assert cache.get("team/a") == pod("a")


@pytest.mark.parametrize("spec", [{"node": "n1"}, None, {}, "text"])
def test_an_unchanged_spec_is_shared_between_old_and_new(spec: Any) -> None:
    """An update decodes only the rest of `old`, whatever the spec is."""
    cache = ObjectCache({})
    old, new = {**pod("a"), "spec": spec}, {**pod("a", version=2), "spec": spec, "status": {"phase": "Running"}}
    known = cache.put("team/a", old)
    before = known.before(new, cache.put("team/a", new))
    assert before == old
    assert before["spec"] is new["spec"]
    assert cache.get("team/a") == new


@pytest.mark.parametrize(
    ("spec", "then"), [({"a": 1}, {"a": 2}), (None, {}), ({"a": 1}, "absent"), ("absent", {"a": 1})]
)
def test_a_changed_spec_is_the_old_one_in_old(spec: Any, then: Any) -> None:
    """Also when it came, or went; `None` is not the same as none."""
    cache = ObjectCache({})
    old, new = ({**pod("a"), "spec": each} for each in (spec, then))
    for obj in old, new:
        if obj["spec"] == "absent":
            del obj["spec"]
    known = cache.put("team/a", old)
    assert known.before(new, cache.put("team/a", new)) == old
    assert cache.get("team/a") == new


def test_objects_are_found_by_every_value_that_an_indexer_names() -> None:
    """One value, several, or none; in the order in which the objects came."""
    cache = ObjectCache({"namespace": by_namespace, "controller": by_controller, "job": by_label("job")})
    cache.put("team/a", pod("a", labels={"job": "x"}, ownerReferences=owned("u1")))
    cache.put("team/b", pod("b", labels={"job": "x"}, ownerReferences=owned("u1", controller=False)))
    cache.put("other/c", pod("c", namespace="other", labels={"job": "x"}))
    cache.put("team/d", pod("d"))
    assert names(cache.by_index("namespace", "team")) == ["a", "b", "d"]
    assert names(cache.by_index("controller", "u1")) == ["a"]
    assert names(cache.by_index("controller", "other")) == []
    assert names(cache.by_index("job", "team/x")) == ["a", "b"]
    assert names(cache.by_index("job", "other/x")) == ["c"]


def test_an_indexer_may_name_several_values() -> None:
    """An object is found under each of them, and under those alone, as they change."""
    cache = ObjectCache({"words": lambda obj: obj["words"].split()})
    cache.put("team/a", {**pod("a"), "words": "red green green"})
    assert [names(cache.by_index("words", word)) for word in ("red", "green", "blue")] == [["a"], ["a"], []]
    cache.put("team/a", {**pod("a", version=2), "words": "green blue"})
    assert [names(cache.by_index("words", word)) for word in ("red", "green", "blue")] == [[], ["a"], ["a"]]
    cache.put("team/a", {**pod("a", version=3), "words": "green green"})
    assert cache.remove("team/a")["words"] == "green green"
    assert [names(cache.by_index("words", word)) for word in ("red", "green", "blue")] == [[], [], []]


def test_indexes_keep_nothing_of_what_is_gone() -> None:
    """Values that no object has any more take no memory."""
    cache = ObjectCache({"controller": by_controller})
    for number in range(100):
        obj = pod("a", version=number, ownerReferences=owned(f"u{number}"))
        cache.put(key_of(obj), obj)
    assert list(cache._indexes["controller"]) == ["u99"]
    cache.remove("team/a")
    assert cache._indexes["controller"] == {}


def test_an_indexer_that_fails_hides_the_object_from_its_index_alone() -> None:
    """A strange object is still cached, and found by the other indexes; once it is corrected, by all."""
    cache = ObjectCache({"strange": lambda obj: [obj["missing"]], "namespace": by_namespace})
    cache.put("team/a", pod("a"))
    assert names(cache.by_index("namespace", "team")) == ["a"]
    cache.put("team/a", {**pod("a", version=2), "missing": "here"})
    assert names(cache.by_index("strange", "here")) == ["a"]
    cache.put("team/a", pod("a", version=3))
    assert names(cache.by_index("strange", "here")) == []
    assert cache.get("team/a") == pod("a", version=3)


def test_an_unknown_index_is_a_mistake() -> None:
    """The name of an unknown index raises instead of finding nothing."""
    with pytest.raises(KeyError, match="jobs"):
        ObjectCache({"job": by_label("job")}).by_index("jobs", "x")
