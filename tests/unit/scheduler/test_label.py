"""The LabelScheduler: who may stay, who may come, and why the others were left out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scheduler.label import LabelScheduler
from scheduler.protocol import Eligibility, NodeState, SchedulerError
from store.schema.manifest import Launchable, Manifest
from store.schema.selectors import Selector

MANIFEST = Manifest(id="hello", launchables={"main": Launchable(command=["true"])})
WEB = Selector.parse("pool=web")


class Directory:
    """A NodeDirectory that counts how often it is walked."""

    def __init__(self, *nodes: NodeState) -> None:
        self._nodes = {node.name: node for node in nodes}
        self.version = 1
        self.walks = 0

    def nodes(self) -> Mapping[str, NodeState]:
        self.walks += 1
        return self._nodes

    def change(self, node: NodeState) -> None:
        self._nodes[node.name] = node
        self.version += 1


def _node(
    name: str,
    pool: str = "web",
    *,
    schedulable: bool = True,
    evict: bool = False,
    live: bool = True,
    lost: bool = False,
) -> NodeState:
    return NodeState(name, {"pool": pool}, schedulable=schedulable, evict=evict, live=live, lost=lost)


async def test_staying_and_coming_are_different_questions() -> None:
    """Cordoned or dead nodes keep what they have; those being emptied, lost, or relabelled do not."""
    directory = Directory(
        _node("n9"),
        _node("n1"),
        _node("n2", schedulable=False),
        _node("n3", schedulable=False, evict=True),
        _node("n4", live=False),
        _node("n5", live=False, lost=True),
        _node("n6", pool="db"),
    )
    answer = await LabelScheduler(directory).eligible_nodes(MANIFEST, WEB)
    assert answer == Eligibility(frozenset({"n1", "n9", "n2", "n4"}), ("n1", "n9"))


async def test_each_selector_gets_its_own_matches_from_one_directory() -> None:
    """Two selectors over the same view never see each other's nodes, and a later one is served as well."""
    directory = Directory(_node("n1"), _node("n2", pool="db"))
    scheduler = LabelScheduler(directory)
    for _ in range(2):
        assert (await scheduler.eligible_nodes(MANIFEST, WEB)).placeable == ("n1",)
        assert (await scheduler.eligible_nodes(MANIFEST, Selector.parse("pool=db"))).placeable == ("n2",)
    assert (await scheduler.eligible_nodes(MANIFEST, Selector.everything())).placeable == ("n1", "n2")


async def test_an_answer_is_kept_until_a_node_changes() -> None:
    """Ten thousand questions with one selector, however spelled, are one pass over the nodes."""
    directory = Directory(*(_node(f"n{number}") for number in range(100)))
    scheduler = LabelScheduler(directory)
    for spelling in ["pool=web", "pool==web", "pool in (web)"] * 1000:
        await scheduler.eligible_nodes(MANIFEST, Selector.parse(spelling))
    assert directory.walks == 1
    before = scheduler.eligibility(WEB)
    directory.change(_node("other", pool="db"))
    assert scheduler.eligibility(WEB) is before, "an equal answer is the same object"
    directory.change(_node("n7", live=False))
    assert "n7" not in scheduler.eligibility(WEB).placeable
    assert directory.walks == 3


async def test_a_selector_without_matches_is_answered() -> None:
    """No node is an answer, not an error."""
    answer = await LabelScheduler(Directory(_node("n1"))).eligible_nodes(MANIFEST, Selector.parse("x=1,x=0"))
    assert answer == Eligibility(frozenset(), ())


def test_every_node_left_out_is_explained() -> None:
    """In words for an operator: the term that fails and what the node has, or its condition and the way out."""
    directory = Directory(
        _node("n1"),
        _node("n2", pool="db"),
        NodeState("n3", {}),
        _node("n4", schedulable=False),
        _node("n5", schedulable=False, evict=True),
        _node("n6", live=False),
        _node("n7", live=False, lost=True),
    )
    scheduler = LabelScheduler(directory)
    assert scheduler.explain(MANIFEST, WEB) == {
        "n2": "it has pool=db, the selector asks for pool=web",
        "n3": "it has no label pool, the selector asks for pool=web",
        "n4": "it is cordoned; `rcfarm node uncordon n4` uses it again",
        "n5": "it is being emptied; `rcfarm node uncordon n5` uses it again",
        "n6": "its agent does not answer; start it (`rcfarm agent`)",
        "n7": "it is lost: its agent has not answered for too long; start it (`rcfarm agent`)",
    }
    left_out = set(directory.nodes()) - set(scheduler.eligibility(WEB).placeable)
    assert set(scheduler.explain(MANIFEST, WEB)) == left_out


async def test_nothing_can_be_allocated_beyond_what_is_eligible() -> None:
    """Labels reserve nothing: asking for more is an error that says what the other nodes lack, of each when there are
    few, by kind when there are many."""
    scheduler = LabelScheduler(Directory(_node("n1"), _node("x0", pool="db"), _node("x1", live=False)))
    with pytest.raises(SchedulerError, match=r"'pool=web'.*3 nodes.*x0: it has pool=db.*x1: its agent") as caught:
        await scheduler.allocate_nodes(MANIFEST, WEB, 1, force=True)
    assert caught.value.left_out == 2
    with pytest.raises(SchedulerError, match="no node is registered"):
        await LabelScheduler(Directory()).allocate_nodes(MANIFEST, WEB, 1)
    await scheduler.deallocate_nodes(WEB, ["n1"], pod_id="hello")
    assert scheduler.eligibility(WEB).placeable == ("n1",)


async def test_a_shortage_is_counted_by_kind_once() -> None:
    """Overload: ten thousand RCs that find no node cost one walk over the nodes, until one of them changes."""
    directory = Directory(
        *(_node(f"dead{n:04}", live=False, lost=n % 2 == 0) for n in range(1998)),
        _node("other", pool="db"),
        _node("empty", schedulable=False, evict=True),
    )
    scheduler = LabelScheduler(directory)
    messages = {await _refusal(scheduler) for _ in range(1000)}
    assert messages == {
        "selector 'pool=web': none of the 2000 nodes can be allocated beyond those eligible now; left out: "
        "1 cordoned (empty), 1 that do not match (other), 1998 without a live agent (dead0000, dead0001, dead0002, …); "
        "`rcfarm rc explain` gives the reason of each"
    }
    assert directory.walks == 2
    directory.change(_node("dead0000", schedulable=False))
    assert "2 cordoned (dead0000, empty)" in await _refusal(scheduler)


async def _refusal(scheduler: LabelScheduler) -> str:
    await scheduler.eligible_nodes(MANIFEST, WEB)
    with pytest.raises(SchedulerError) as caught:
        await scheduler.allocate_nodes(MANIFEST, WEB, 3)
    return str(caught.value)
