"""`rcfarm hived validate` and `show`: a HiveD configuration, its problems, its cells and its quotas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rcfarm.cli import ERROR
from rcfarm.cli.kit.command import LocalCli
from rcfarm.cli.kit.options import UsageProblem, read_file
from rcfarm.cli.kit.output import count, state
from rcfarm.reports.hived_config import CellsInfo, HivedFileInfo, ProblemInfo, cluster_info, file_info
from scheduler.hived.cells.topology import Topology
from scheduler.hived.config.file import ConfigWarning, lines_of, read_config
from scheduler.hived.config.resolve import advice, resolve
from scheduler.hived.errors import ConfigError, InvalidConfig

ConfigPath = Annotated[Path, typer.Argument(metavar="FILE", help="HiveD's configuration; - is standard input.")]


async def validate(cli: LocalCli, file: ConfigPath) -> int:
    """Check a HiveD configuration. Reports every error and likely mistake; exits with 1 if the file can't be used."""
    info, _ = examine(file)
    cli.out.show(info, lambda: print_findings(cli, info))
    return 0 if info.valid else ERROR


def examine(file: Path) -> tuple[HivedFileInfo, Topology | None]:
    """Return the findings on a file, and its topology if it is valid. Raises `UsageProblem` if it can't be read."""
    try:
        text = read_file("FILE", file).decode()
    except UnicodeDecodeError as error:
        raise UsageProblem(f"FILE {file}: is not text in UTF-8: {error}") from error
    try:
        config = read_config(text, environ=os.environ, home=Path(os.path.expanduser("~")))
        topology = resolve(config)
    except InvalidConfig as invalid:
        errors = _problems(text, invalid.errors)
        return HivedFileInfo(file=str(file), valid=False, errors=errors, warnings=[]), None
    return file_info(str(file), topology, _problems(text, [*advice(config, topology)])), topology


def _problems(text: str, found: Sequence[ConfigError | ConfigWarning]) -> list[ProblemInfo]:
    """Return the problems in the order of the file."""
    lines = lines_of(text, [each.path for each in found])
    pairs = zip(found, lines, strict=True)
    infos = [ProblemInfo(path=each.path, line=line, problem=each.problem) for each, line in pairs]
    return sorted(infos, key=lambda info: info.line or 0)


def print_findings(cli: LocalCli, info: HivedFileInfo) -> None:
    """Print each finding on its own line, in the format of compilers, then the verdict."""
    for level, problems in (("error", info.errors), ("warning", info.warnings)):
        for each in problems:
            place = f"{info.file}:{each.line}: " if each.line else f"{info.file}: "
            path = f"{each.path}: " if each.path else ""
            cli.out.line(Text.assemble(place, state(level), f": {path}{each.problem}"))
    if not info.valid:
        cli.out.line(f"{info.file} can't be used: {count(len(info.errors), 'error')}")
        return
    found = ", ".join(
        (
            count(info.chains, "chain"),
            count(info.nodes, "node"),
            count(info.leaves, "leaf", "leaves"),
            count(info.virtual_clusters, "virtual cluster"),
        )
    )
    warnings = f"; {count(len(info.warnings), 'warning')}" if info.warnings else ""
    cli.out.line(f"{info.file} is valid: {found}{warnings}")


async def show(cli: LocalCli, file: ConfigPath) -> int:
    """Show the cells and quotas of a HiveD configuration. Equal cells of a chain are folded; cells that no virtual
    cluster owns are left for opportunistic pods."""
    info, topology = examine(file)
    if topology is None:
        cli.out.show(info, lambda: print_findings(cli, info))
        return ERROR
    found = cluster_info(topology)

    def render() -> None:
        for chain in found.chains:
            sizes = f"{count(chain.nodes, 'node')}, {count(chain.leaves, 'leaf', 'leaves')}"
            uses = f"{chain.guaranteed} guaranteed, {chain.opportunistic_only} left for opportunistic pods only"
            cli.out.line(Text.assemble((chain.chain, "bold"), f": {sizes}: {uses}"))
            numbers = ["", *(f"{kind.children} " for kind in chain.types)]
            nodes = [" (node)" if kind.is_node_level else "" for kind in chain.types]
            types = " > ".join(
                f"{number}{kind.cell_type}{node}"
                for number, kind, node in zip(numbers, chain.types, nodes, strict=False)
            )
            cli.out.line(f"  {types}")
            cli.out.table(("CELL", "ADDRESS", "DEVICES", "PINNED"), _rows(chain.cells, 0), indent=2)
            cli.out.line()
        if not found.quotas:
            cli.out.note("no virtual cluster has a quota: no guaranteed pod can be placed")
            return
        cli.out.table(
            ("VIRTUAL CLUSTER", "CHAIN", "CELL TYPE", "CELLS>", "LEAVES>", "PINNED"),
            [
                (
                    each.virtual_cluster,
                    each.chain,
                    each.cell_type,
                    str(each.cells),
                    str(each.leaves),
                    each.pinned_cell_id,
                )
                for each in found.quotas
            ],
        )

    cli.out.show(found, render)
    return 0


def _rows(cells: Sequence[CellsInfo], depth: int) -> list[tuple[str, str, str, str]]:
    rows = []
    for each in cells:
        first, last = (address.rpartition("/")[2] for address in (each.addresses[0], each.addresses[-1]))
        names = first if len(each.addresses) == 1 else f"{first} … {last} ({len(each.addresses)})"
        runs: list[list[int]] = []
        for index in each.devices:
            if runs and index == runs[-1][-1] + 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        devices = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
        rows.append(("  " * depth + each.cell_type, names, devices, each.pinned_cell_id))
        rows += _rows(each.children, depth + 1)
    return rows
