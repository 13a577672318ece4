"""Inspection: HiveD's JSON, and consistent snapshots that let decisions interrupt them."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterable

import pytest

from scheduler.hived.errors import NotNow, UserError
from scheduler.hived.inspection.inspection import SLICE, Inspected, Inspection
from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import quota, regular
from tests.support.hived.naive_inspection import expected_cluster, shown

CONFIG = regular("GPU 2 PAIR 1 HOST* 2 RACK", ["a0", 'a"1'], vision=quota(("RACK.HOST", 1)), nlp=quota())


def text(pieces: Iterable[bytes]) -> str:
    return b"".join(pieces).decode()


async def test_cells_as_hived_writes_them() -> None:
    """Fields and their order; empty and false fields are left out; a bound cell shows the other side without
    children.
    """
    cluster = Cluster(CONFIG)
    cluster.ask(Job("train", "vision", 5, ((1, 1),)))
    cluster.ask(Job("probe", "nlp", -1, ((1, 1),)))
    inspection = Inspection(Inspected(cluster.algorithm))
    cluster.break_('a"1')
    physical, virtual = (text(await inspection.physical_cluster()), text(await inspection.virtual_clusters()))
    assert physical == (
        '[{"leafCellType":"GPU","cellType":"RACK","cellAddress":"0","cellState":"Used","cellHealthiness":"Bad",'
        '"cellPriority":5,"cellChildren":['
        '{"cellType":"HOST","isNodeLevel":true,"cellAddress":"0/a0","cellState":"Used","cellHealthiness":"Healthy",'
        '"cellPriority":5,"cellChildren":['
        '{"cellType":"PAIR","cellAddress":"0/a0/0","cellState":"Used","cellHealthiness":"Healthy","cellPriority":5,'
        '"cellChildren":['
        '{"cellType":"GPU","cellAddress":"0/a0/0/0","cellState":"Used","cellHealthiness":"Healthy","cellPriority":5,'
        '"vc":"vision","virtualCell":{"cellType":"GPU","cellAddress":"vision/0/0/0","cellState":"Used",'
        '"cellHealthiness":"Healthy","cellPriority":5}},'
        '{"cellType":"GPU","cellAddress":"0/a0/0/1","cellState":"Free","cellHealthiness":"Healthy","cellPriority":-2}],'
        '"vc":"vision","virtualCell":{"cellType":"PAIR","cellAddress":"vision/0/0","cellState":"Used",'
        '"cellHealthiness":"Healthy","cellPriority":5}}],'
        '"vc":"vision","virtualCell":{"leafCellType":"GPU","cellType":"HOST","isNodeLevel":true,'
        '"cellAddress":"vision/0","cellState":"Used","cellHealthiness":"Healthy","cellPriority":5}},'
        '{"cellType":"HOST","isNodeLevel":true,"cellAddress":"0/a\\"1","cellState":"Used","cellHealthiness":"Bad",'
        '"cellPriority":-1,"cellChildren":['
        '{"cellType":"PAIR","cellAddress":"0/a\\"1/0","cellState":"Used","cellHealthiness":"Bad","cellPriority":-1,'
        '"cellChildren":['
        '{"cellType":"GPU","cellAddress":"0/a\\"1/0/0","cellState":"Used","cellHealthiness":"Bad","cellPriority":-1,'
        '"vc":"nlp"},'
        '{"cellType":"GPU","cellAddress":"0/a\\"1/0/1","cellState":"Free","cellHealthiness":"Bad","cellPriority":-2}]'
        "}]}]}]"
    )
    expected = expected_cluster(cluster.algorithm)
    assert [physical, virtual] == [
        json.dumps(expected[part], separators=(",", ":")) for part in ("physicalCluster", "virtualClusters")
    ]
    assert text(await inspection.cluster_status()) == f'{{"physicalCluster":{physical},"virtualClusters":{virtual}}}'
    assert json.loads(text(await inspection.virtual_cluster("nlp"))) == json.loads(virtual)["nlp"]


async def test_groups_as_hived_writes_them() -> None:
    """An allocated group, a preempting one, and a downgraded one; empty fields are left out."""
    cluster = Cluster(CONFIG)
    inspection = Inspection(Inspected(cluster.algorithm))
    assert text(await inspection.affinity_groups()) == '{"items":null}'
    cluster.ask(Job("a/train", "vision", 1, ((1, 2),), lazy=False), pod="t")
    assert text(await inspection.affinity_group("a/train")) == (
        '{"metadata":{"name":"a/train"},"status":{"vc":"vision","priority":1,"state":"Allocated",'
        '"physicalPlacement":{"a0":[0,1]},"virtualPlacement":{"vision/0":["vision/0/0/0","vision/0/0/1"]},'
        '"allocatedPods":["t"]}}'
    )
    cluster.ask(Job("urgent", "vision", 2, ((1, 2),)), pod="u")
    groups = json.loads(text(await inspection.affinity_groups()))["items"]
    assert [(group["metadata"]["name"], group["status"]["state"]) for group in groups] == [
        ("a/train", "BeingPreempted"),
        ("urgent", "Preempting"),
    ]
    assert groups[1]["status"]["preemptingPods"] == ["u"]
    assert "allocatedPods" not in groups[1]["status"]


async def test_a_downgraded_group_shows_preemptor_and_time() -> None:
    """It keeps the priority that it requested, as in HiveD."""
    cluster = Cluster(CONFIG, now=1606291200.9)
    cluster.ask(Job("train", "vision", 1, ((1, 2),), lazy=True))
    cluster.ask(Job("urgent", "vision", 2, ((1, 2),)))
    status = json.loads(text(await Inspection(Inspected(cluster.algorithm)).affinity_group("train")))["status"]
    assert status["lazyPreemptionStatus"] == {"preemptor": "urgent", "preemptionTime": "2020-11-25T08:00:00Z"}
    assert (status["priority"], "virtualPlacement" in status) == (1, False)


@pytest.mark.parametrize("what", ["affinity_group", "virtual_cluster"])
async def test_names_that_do_not_exist_are_user_errors(what: str) -> None:
    """The errors contain the name."""
    with pytest.raises(UserError, match="none"):
        await getattr(Inspection(Inspected(Cluster(CONFIG).algorithm)), what)("none")


async def test_groups_that_are_gone_are_not_listed() -> None:
    """However many were deleted."""
    cluster = Cluster(CONFIG)
    inspection = Inspection(Inspected(cluster.algorithm))
    cluster.ask(Job("stays", "vision", 1), pod="s")
    for number in range(10):
        cluster.ask(Job(f"g{number}", "nlp", -1), pod="p")
        assert len((await shown(inspection.affinity_groups()))["items"]) == 2
        cluster.delete("p")
        assert [group["metadata"]["name"] for group in (await shown(inspection.affinity_groups()))["items"]] == [
            "stays"
        ]


async def test_a_cell_has_the_most_significant_state_below() -> None:
    """Used before Reserving before Reserved before Free, for a node by its devices and for a rack by its nodes."""
    config = copy.deepcopy(CONFIG)
    config["physicalCluster"]["cellTypes"]["PAIR"]["childCellNumber"] = 3
    cluster = Cluster(config)
    inspection = Inspection(Inspected(cluster.algorithm))

    async def states() -> set[str]:
        (rack,) = await shown(inspection.physical_cluster())
        host = rack["cellChildren"][0]
        return {rack["cellState"], host["cellState"], host["cellChildren"][0]["cellState"]}

    cluster.ask(Job("strong", "vision", 9), pod="strong")
    for name in ("first", "second"):
        cluster.ask(Job(name, "vision", 0, lazy=False), pod=name)
    assert cluster.ask(Job("preemptor", "vision", 5, ((1, 2),)), pod="preemptor").victims == {"first", "second"}
    cluster.delete("first")
    assert {str(leaf.state) for leaf in cluster.leaves("a0")} == {"Used", "Reserving", "Reserved"}
    assert await states() == {"Used"}
    for gone, left in (("strong", "Reserving"), ("second", "Reserved"), ("preemptor", "Free")):
        cluster.delete(gone)
        assert await states() == {left}


class SlowClock:
    """A clock that advances half a slice at every call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += SLICE / 2
        return self.now


def rack_config(hosts: int) -> Object:
    """Return `CONFIG` with more hosts; half of them are the quota of one tenant."""
    names = [f"n{number}" for number in range(hosts)]
    return regular(f"GPU 2 PAIR 1 HOST* {hosts} RACK", names, vision=quota(("RACK.HOST", hosts // 2)))


async def test_a_snapshot_shows_one_moment() -> None:
    """Decisions are made between the slices of rendering; the snapshot shows the state after the last of them, and
    nothing that happens while it is sent.
    """
    cluster = Cluster(rack_config(32))
    inspection = Inspection(Inspected(cluster.algorithm), clock=SlowClock())
    task = asyncio.create_task(inspection.cluster_status())
    decisions = 0
    expected: Object = {}
    while not task.done():
        if decisions < 20:
            cluster.ask(Job(f"g{decisions}", "vision", decisions % 5, ((2, 1),)))
            decisions += 1
        expected = expected_cluster(cluster.algorithm)
        await asyncio.sleep(0)
    assert decisions == 20, "it did not yield"
    pieces = await task
    cluster.ask(Job("later", "vision", 1, ((4, 2),)))
    cluster.ask(Job("probe", "vision", -1))
    assert await shown(inspection.cluster_status()) == expected_cluster(cluster.algorithm)
    assert json.loads(b"".join(pieces)) == expected


async def test_opportunistic_use_shows_on_every_pinned_cell_around_it() -> None:
    """No virtual cell is in use, but the pinned ones above it are bound to used cells."""
    config = rack_config(2)
    config["physicalCluster"]["physicalCells"][0]["pinnedCellId"] = "all"
    config["virtualClusters"] = {"vision": {"pinnedCells": [{"pinnedCellId": "all"}]}, "nlp": {}}
    cluster = Cluster(config)
    inspection = Inspection(Inspected(cluster.algorithm))
    for name in ("first", "second"):
        assert await shown(inspection.cluster_status()) == expected_cluster(cluster.algorithm)
        cluster.ask(Job(name, "nlp", -1), pod=name)
    [pinned] = await shown(inspection.virtual_cluster("vision"))
    assert pinned["physicalCell"]["cellState"] == "Used"
    cluster.delete("first", "second")
    assert await shown(inspection.cluster_status()) == expected_cluster(cluster.algorithm)


async def test_many_may_ask_at_once() -> None:
    """All requests get whole snapshots."""
    cluster = Cluster(rack_config(8))
    cluster.ask(Job("train", "vision", 1, ((2, 2),)))
    inspection = Inspection(Inspected(cluster.algorithm), clock=SlowClock())
    answers = await asyncio.gather(*(shown(inspection.cluster_status()) for _ in range(10)))
    assert answers == [expected_cluster(cluster.algorithm)] * 10


async def test_another_algorithm_is_followed() -> None:
    """Also by a request in preparation at that moment."""
    first, second = Cluster(rack_config(8)), Cluster(CONFIG)
    inspection = Inspection(Inspected(first.algorithm), clock=SlowClock())
    task = asyncio.create_task(inspection.cluster_status())
    await asyncio.sleep(0)
    inspection.follow(Inspected(second.algorithm))
    assert json.loads(b"".join(await task)) == expected_cluster(second.algorithm)
    assert await shown(inspection.affinity_groups()) == {"items": None}


@pytest.mark.parametrize(
    "what", ["affinity_groups", "cluster_status", "physical_cluster", "virtual_clusters", "snapshot"]
)
async def test_requests_before_the_first_lists_are_refused(what: str) -> None:
    """Without nodes and pods all cells would appear bad and free, so the client has to try again."""
    inspection = Inspection(Inspected(Cluster(CONFIG).algorithm), check=not_ready)
    for call in (
        getattr(inspection, what),
        lambda: inspection.affinity_group("a"),
        lambda: inspection.virtual_cluster("nlp"),
    ):
        with pytest.raises(NotNow, match="not yet"):
            await call()


def not_ready() -> None:
    raise NotNow("not yet")
