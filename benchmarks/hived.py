"""Speed of HiveD's decisions, up to 65,536 GPUs. Run: python -m benchmarks.hived [NAME …]

Each part prints one JSON line. Clusters of 8-GPU nodes are built and filled to four fifths; then groups end and come,
and are measured. `decide` is the first schedule call of a group, which places all of it, `follow` are those of its
other pods, `schedule` is both. The annotations are new to the scheduler: reading them is part of a decision, and of
adding an allocated pod. One node in 200 is bad. Milliseconds, unless a name ends in `_s`.

    leaves   the choice of 12 of 22 free leaves
    large    8,192 nodes, 65,536 GPUs: from the text of the configuration on
    medium   2,048 nodes
    curve    what a decision costs as a cluster grows from 512 to 16,384 nodes
    http     filter over HTTP with 1,000 node names, alone and while others inspect the whole cluster
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from benchmarks.fleet import report
from benchmarks.hived_cluster import GPUS, Cluster, Stopwatch
from benchmarks.hived_http import measure
from rcfarm.daemon.daemon import freeze_all, freeze_survivors
from scheduler.hived.planning.packing import choose_leaves

FILLED = 0.8
BROKEN = 0.005  # of all nodes, while decisions are measured
TURNS = 3000
MEASURED = (
    "decide",
    "follow",
    "schedule",
    "commit",
    "delete_allocated",
    "node_bad",
    "node_healthy",
)


def in_stride(nodes: int, turns: int) -> Cluster:
    """Return a cluster that was filled, and then measured while `turns` groups came and others ended."""
    cluster = Cluster(nodes)
    cluster.fill(FILLED)
    freeze_all()  # as the extender does with what it finds at its start
    cluster.watch = Stopwatch()
    cluster.outcomes.clear()
    cluster.break_nodes(BROKEN)
    for _ in range(turns):
        cluster.turn(FILLED)
    cluster.watch.took["schedule"] = cluster.watch.took["decide"] + cluster.watch.took["follow"]
    return cluster


def leaves() -> None:
    """Choose leaves in one unit of 22 free leaves; each choice is new."""
    choices = 1000
    begin = time.perf_counter()
    for _ in range(choices):
        choose_leaves.__wrapped__((22,), (1 << 22) - 1, 0, 12)
    report("leaves_12_of_22", milliseconds=round((time.perf_counter() - begin) / choices * 1000, 4))


def _cluster(nodes: int) -> None:
    cluster = in_stride(nodes, TURNS)
    report(
        f"nodes_{nodes}",
        gpus=nodes * GPUS,
        **cluster.built,
        built_s=round(sum(cluster.built.values()), 2),
        used=round(cluster.used / cluster.size, 2),
        outcomes=cluster.outcomes,
        **{what: cluster.watch.figures(what) for what in MEASURED if cluster.watch.took[what]},
    )


def large() -> None:
    _cluster(8192)


def medium() -> None:
    _cluster(2048)


def curve() -> None:
    """Report the medians and 99th percentiles of `decide`."""
    sizes = (512, 1024, 2048, 4096, 8192, 16384)
    figures = {nodes: in_stride(nodes, TURNS // 2).watch.figures("decide") for nodes in sizes}
    report(
        "curve",
        p50={nodes: figure["p50"] for nodes, figure in figures.items()},
        p99={nodes: figure["p99"] for nodes, figure in figures.items()},
    )


def http() -> None:
    report("http", nodes=8192, **measure(8192, FILLED, pods=2000))


PARTS: dict[str, Callable[[], None]] = {part.__name__: part for part in (leaves, large, medium, curve, http)}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        sys.exit(f"there is no {', '.join(unknown)}; use {', '.join(PARTS)}")
    freeze_survivors()  # as the extender does
    for name in wanted:
        PARTS[name]()


if __name__ == "__main__":
    main()
