"""Defects that random lives of the algorithm have found, each as its shortest story."""

from __future__ import annotations

from scheduler.hived.invariants import violations
from store.kube.objects import Object
from tests.support.hived import Cluster, Job


def boxes(number: int, size: int = 2, *, quotas: Object, pinned: dict[tuple[int, int], str] | None = None) -> Object:
    """Nodes n0, n1... of type BOX with leaves of type A. `pinned`: ids of (node, device)."""
    cells = [
        {
            "cellType": "BOX",
            "cellAddress": f"n{node}",
            "cellChildren": [
                {"cellAddress": str(device), "pinnedCellId": (pinned or {}).get((node, device), "")}
                for device in range(size)
            ],
        }
        for node in range(number)
    ]
    types = {"BOX": {"childCellType": "A", "childCellNumber": size, "isNodeLevel": True}}
    return {
        "physicalCluster": {"cellTypes": types, "physicalCells": cells},
        "virtualClusters": {
            name: {
                "virtualCells": [{"cellType": cell_type, "cellNumber": count} for cell_type, count in quota.items()],
                "pinnedCells": [],
            }
            for name, quota in quotas.items()
        },
    }


def test_an_opportunistic_group_is_evicted_and_never_downgraded() -> None:
    """A pinned leaf is bound even while an opportunistic pod that allows lazy preemption uses it."""
    config = boxes(1, quotas={"V": {}}, pinned={(0, 1): "pin"})
    config["virtualClusters"]["V"]["pinnedCells"] = [{"pinnedCellId": "pin"}]
    cluster = Cluster(config)
    cluster.ask(Job("cheap", "V", -1, ((1, 2),), lazy=True))
    answer = cluster.ask(Job("owner", "V", 0, pinned="pin"))
    assert answer.victims == {"cheap-0"}
    assert cluster.group("cheap").lazy_preemption is None
    assert violations(cluster.algorithm) == []


def test_a_group_that_recovery_has_no_quota_for_shows_that_it_was_downgraded() -> None:
    """Under a smaller quota it runs on as an opportunistic group, preempted by itself."""
    cluster = Cluster(boxes(1, quotas={"V": {"BOX": 1}}))
    cluster.ask(Job("job", "V", 5, ((1, 2),)))
    group = cluster.restarted(boxes(1, quotas={"V": {}})).group("job")
    assert group.priority == -1
    assert group.lazy_preemption is not None
    assert group.lazy_preemption.preemptor == "job"
