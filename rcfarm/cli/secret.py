"""`rcfarm secret`: what pods get as variables, and manifests must not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_secret
from rcfarm.cli.kit.options import Yes, confirm, read_file
from rcfarm.operations.secrets import Secrets, check_name

app = typer.Typer(rich_markup_mode=None)

SecretName = Annotated[
    str, typer.Argument(metavar="NAME", help="The secret's name, such as shop-db.", autocompletion=complete_secret)
]


class SecretInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One secret, without its values. `variables`: the names of its variables; None: it is one value, for a plugin of
    tasks. `rcs`: whose pods are to get it."""

    name: str
    variables: list[str] | None
    rcs: list[str]


async def set_(
    cli: Cli,
    name: SecretName,
    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="Lines of NAME=value; - is standard input.")
    ],
    plain: Annotated[
        bool, typer.Option("--plain", help="The file is one value, for a plugin of tasks, and not lines of NAME=value.")
    ] = False,
) -> None:
    """Store a secret in Consul. Pods get a changed one when they are started again, as by `rcfarm rc restart`."""
    content = read_file("--file", file)
    await cli.prepare()
    changed = await Secrets(cli.store, cli.keys, actor=cli.actor).set(name, content, plain=plain)
    action = "set" if changed else "unchanged"
    cli.out.show({"secret": name, "action": action}, lambda: cli.out.line(f"secret {name}: {action}"))


async def list_(cli: Cli) -> None:
    """List the secrets in Consul, without their values."""
    found = [
        SecretInfo(name=each.name, variables=each.variables, rcs=each.rcs)
        for each in await Secrets(cli.store, cli.keys).list()
    ]
    rows = (
        (each.name, "one value" if each.variables is None else " ".join(each.variables), " ".join(each.rcs) or "-")
        for each in found
    )
    cli.out.show(found, lambda: cli.out.table(("SECRET", "VARIABLES", "USED BY"), rows))
    if not found:
        cli.out.note("no secrets; make one with `rcfarm secret set NAME --file FILE`")


async def delete(
    cli: Cli,
    name: SecretName,
    yes: Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Also if pods are to get it.")] = False,
) -> None:
    """Remove a secret. Pods that run keep what they got."""
    check_name(name)
    confirm(f"Delete secret {name}?", yes=yes)
    await Secrets(cli.store, cli.keys, actor=cli.actor).delete(name, force=force)
    cli.out.show({"secret": name, "action": "deleted"}, lambda: cli.out.line(f"secret {name}: deleted"))


async def policy(
    cli: Cli,
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="The secrets' names.")],
    write: Annotated[bool, typer.Option("--write", help="For those who set them, not for agents.")] = False,
) -> None:
    """Print the Consul policy for the agents whose pods get these secrets."""
    for name in names:
        check_name(name)
    right = "write" if write else "read"
    rules = [f'key "{cli.keys.secret(name)}" {{ policy = "{right}" }}' for name in names]
    if write:
        rules.append(f'key_prefix "{cli.keys.audit}" {{ policy = "write" }}')
    cli.out.show(rules, lambda: typer.echo("\n".join(rules)))


command(app, "set", creates_store=True)(set_)
command(app, "list")(list_)
command(app, "delete")(delete)
command(app, "policy", reads_meta=False)(policy)
