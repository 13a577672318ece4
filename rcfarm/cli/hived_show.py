"""`rcfarm hived show`: trees of cells, and quotas."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from rcfarm.cli.errors import ERROR
from rcfarm.cli.hived_file import ConfigPath, examine, print_findings
from rcfarm.cli.local import LocalCli
from rcfarm.cli.words import count
from rcfarm.hived_view import CellsInfo, CellTypeInfo, ChainInfo, HivedClusterInfo, QuotaInfo, cluster_info


async def show(cli: LocalCli, file: ConfigPath) -> int:
    """Show the cells and quotas of a HiveD configuration. Equal cells of a chain are folded; what no virtual cluster
    owns is left for opportunistic pods."""
    info, topology = examine(file)
    if topology is None:
        cli.out.show(info, lambda: print_findings(cli, info))
        return ERROR
    found = cluster_info(topology)
    cli.out.show(found, lambda: _print(cli, found))
    return 0


def _print(cli: LocalCli, found: HivedClusterInfo) -> None:
    for chain in found.chains:
        cli.out.line(Text.assemble((chain.chain, "bold"), f": {_sums(chain)}"))
        cli.out.line(f"  {_types(chain.types)}")
        cli.out.table(("CELL", "ADDRESS", "DEVICES", "PINNED"), _rows(chain.cells, 0), indent=2)
        cli.out.line()
    if not found.quotas:
        cli.out.note("no virtual cluster has a quota: there is nothing that a guaranteed pod could get")
        return
    cli.out.table(
        ("VIRTUAL CLUSTER", "CHAIN", "CELL TYPE", "CELLS>", "LEAVES>", "PINNED"),
        [_quota(each) for each in found.quotas],
    )


def _sums(chain: ChainInfo) -> str:
    return (
        f"{count(chain.nodes, 'node')}, {count(chain.leaves, 'leaf', 'leaves')}: {chain.guaranteed} guaranteed, "
        f"{chain.opportunistic_only} left for opportunistic pods only"
    )


def _types(kinds: Sequence[CellTypeInfo]) -> str:
    """`RACK > 4 HOST (node) > 8 GPU`: what one cell of each type has of the next one."""
    numbers = ["", *(f"{kind.children} " for kind in kinds)]
    nodes = [" (node)" if kind.is_node_level else "" for kind in kinds]
    return " > ".join(
        f"{number}{kind.cell_type}{node}" for number, kind, node in zip(numbers, kinds, nodes, strict=False)
    )


def _rows(cells: Sequence[CellsInfo], depth: int) -> list[tuple[str, str, str, str]]:
    rows = []
    for each in cells:
        rows.append(("  " * depth + each.cell_type, _names(each), _devices(each.devices), each.pinned_cell_id))
        rows += _rows(each.children, depth + 1)
    return rows


def _names(cells: CellsInfo) -> str:
    """The last parts of the addresses; of many the first and the last one."""
    first, last = (address.rpartition("/")[2] for address in (cells.addresses[0], cells.addresses[-1]))
    return first if len(cells.addresses) == 1 else f"{first} … {last} ({len(cells.addresses)})"


def _devices(indices: Sequence[int]) -> str:
    """`0-7`, or `1,3,4,7,0,2,6,5` where they do not follow each other."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _quota(quota: QuotaInfo) -> tuple[str, str, str, str, str, str]:
    return (
        quota.virtual_cluster,
        quota.chain,
        quota.cell_type,
        str(quota.cells),
        str(quota.leaves),
        quota.pinned_cell_id,
    )
