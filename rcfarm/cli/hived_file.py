"""Reading a HiveD configuration for a command, and `rcfarm hived validate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rcfarm.cli.arguments import read_file
from rcfarm.cli.errors import ERROR, UsageProblem
from rcfarm.cli.local import LocalCli
from rcfarm.cli.output import state
from rcfarm.cli.words import count
from rcfarm.hived_view import HivedFileInfo, ProblemInfo, file_info
from scheduler.hived.config import ConfigWarning
from scheduler.hived.config_advice import advice
from scheduler.hived.config_file import lines_of, read_config
from scheduler.hived.errors import ConfigError, InvalidConfig
from scheduler.hived.resolving import resolve
from scheduler.hived.topology import Topology

ConfigPath = Annotated[Path, typer.Argument(metavar="FILE", help="HiveD's configuration; - is standard input.")]


async def validate(cli: LocalCli, file: ConfigPath) -> int:
    """Check a HiveD configuration. Reports every error and likely mistake; exits with 1 when it can't be used."""
    info, _ = examine(file)
    cli.out.show(info, lambda: print_findings(cli, info))
    return 0 if info.valid else ERROR


def examine(file: Path) -> tuple[HivedFileInfo, Topology | None]:
    """What is to be said of a file, and what it resolves to. Raises `UsageProblem` for one that can't be read."""
    text = _text(file)
    try:
        config = read_config(text, environ=os.environ, home=Path(os.path.expanduser("~")))
        topology = resolve(config)
    except InvalidConfig as invalid:
        errors = _problems(text, invalid.errors)
        return HivedFileInfo(file=str(file), valid=False, errors=errors, warnings=[]), None
    return file_info(str(file), topology, _problems(text, [*advice(config, topology)])), topology


def _text(file: Path) -> str:
    try:
        return read_file("FILE", file).decode()
    except UnicodeDecodeError as error:
        raise UsageProblem(f"FILE {file}: is not text in UTF-8: {error}") from error


def _problems(text: str, found: Sequence[ConfigError | ConfigWarning]) -> list[ProblemInfo]:
    """In the order of the file."""
    lines = lines_of(text, [each.path for each in found])
    pairs = zip(found, lines, strict=True)
    infos = [ProblemInfo(path=each.path, line=line, problem=each.problem) for each, line in pairs]
    return sorted(infos, key=lambda info: info.line or 0)


def print_findings(cli: LocalCli, info: HivedFileInfo) -> None:
    """Every finding on a line of its own, as compilers print theirs, and the verdict."""
    for level, problems in (("error", info.errors), ("warning", info.warnings)):
        for each in problems:
            place = f"{info.file}:{each.line}: " if each.line else f"{info.file}: "
            path = f"{each.path}: " if each.path else ""
            cli.out.line(Text.assemble(place, state(level), f": {path}{each.problem}"))
    cli.out.line(_verdict(info))


def _verdict(info: HivedFileInfo) -> str:
    if not info.valid:
        return f"{info.file} can't be used: {count(len(info.errors), 'error')}"
    found = ", ".join(
        (
            count(info.chains, "chain"),
            count(info.nodes, "node"),
            count(info.leaves, "leaf", "leaves"),
            count(info.virtual_clusters, "virtual cluster"),
        )
    )
    warnings = f"; {count(len(info.warnings), 'warning')}" if info.warnings else ""
    return f"{info.file} is valid: {found}{warnings}"
