"""Options and start-up shared by the daemons: flags become settings, bad settings become one clear line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.kit.errors import ERROR, UsageProblem
from rcfarm.cli.kit.options import parse_pairs
from rcfarm.config.settings import BadSettings, Settings
from rcfarm.config.sources import PREFIX, load
from rcfarm.daemon.visible import visible
from rcfarm.operations.errors import BadInput
from store.kube.api.errors import NoConfig
from store.kv.protocol import StoreError

SECRETS = frozenset({"web.token"})

Config = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="Settings, as TOML.")]
StoreUrl = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="consul://HOST:PORT, consuls://… (TLS), embedded:DIR or memory:"),
]
Root = Annotated[str | None, typer.Option("--root", metavar="PREFIX", help="First part of every key.")]
Listen = Annotated[
    str | None,
    typer.Option("--listen", metavar="HOST:PORT|off", help="Address that serves /livez, /readyz and /metrics."),
]
LogLevel = Annotated[str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option("--log-format", metavar="FORMAT", help="auto, json or console.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any other setting; may be repeated."),
]


def run_role(
    run: Callable[[Settings], int],
    config: Path | None,
    flags: Mapping[str, str | None],
    others: list[str] | None,
) -> None:
    """Load the settings, run the role and exit with its code."""
    try:
        given = parse_pairs("--set", others or ())
        for name in SECRETS & given.keys():
            section, _, field = name.partition(".")
            variable = f"{PREFIX}{section}_{field}".upper()
            raise UsageProblem(
                f"--set {name}=…: every user of this machine can read command lines (ps); write the secret into a file "
                f"and give --set {name}_file=FILE, or set {variable}; and change the secret, because it has been "
                "exposed"
            )
        settings = load(config, environ=os.environ, overrides={**flags, **given})
        code = run(settings)
    except (BadSettings, BadInput, NoConfig, UsageProblem, StoreError) as error:
        typer.echo(visible(f"error: {error}"), err=True)
        code = ERROR
    sys.exit(code)
