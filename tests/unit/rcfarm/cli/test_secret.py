"""Tests of `rcfarm secret`."""

from __future__ import annotations

from pathlib import Path

from store.schema import audit
from tests.support.programs.cli import CommandLine

MANIFEST = """\
id: shop
replicas: 0
manifest:
  id: shop
  launchables:
    web: {command: [sleep, "1"], env_from: {consul: shop-db}}
"""


async def test_a_secret_is_set_listed_and_deleted_without_showing_it(cli: CommandLine, tmp_path: Path) -> None:
    """It can't be deleted while pods are to get it, unless that is forced. The audit log names its variables only."""
    assert (await cli("secret", "list")).err.startswith("no secrets; make one with `rcfarm secret set")
    (tmp_path / "db").write_text("DB_PASSWORD=hunter2\nDB_USER=shop\n")
    assert (await cli("secret", "set", "shop-db", "-f", str(tmp_path / "db"))).out == "secret shop-db: set\n"
    assert (await cli("secret", "set", "shop-db", "-f", str(tmp_path / "db"))).out == "secret shop-db: unchanged\n"
    assert (await cli("secret", "set", "token", "-f", "-", "--plain", stdin="hunter2")).code == 0
    assert (await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=MANIFEST)).code == 0
    listed = await cli("secret", "list")
    assert listed.out.splitlines() == [
        "SECRET   VARIABLES            USED BY",
        "shop-db  DB_PASSWORD DB_USER  shop",
        "token    one value            -",
    ]
    refused = await cli("secret", "delete", "shop-db", "-y")
    assert (refused.code, refused.out) == (1, "")
    assert "pods of shop could not start without it: change their manifests first, or use --force" in refused.err
    assert (await cli("secret", "delete", "shop-db", "-y", "--force")).out == "secret shop-db: deleted\n"
    again = await cli("secret", "delete", "shop-db", "-y", "--force")
    assert "there is no secret shop-db; `rcfarm secret list` shows those that exist" in again.err
    events = await audit.events(cli.store, cli.keys)
    named = [event for event in events if event.event_type.startswith("SECRET")]
    assert [event.event_type for event in named] == ["SECRET_SET", "SECRET_SET", "SECRET_DELETED"]
    assert named[0].event_details == {"secret": "shop-db", "variables": ["DB_PASSWORD", "DB_USER"]}
    assert "hunter2" not in str(events)


async def test_what_can_be_no_secret_is_refused(cli: CommandLine, tmp_path: Path) -> None:
    lines = await cli("secret", "set", "db", "-f", "-", stdin="PASSWORD=1\nhunter2\n")
    assert (lines.code, lines.err) == (
        1,
        "error: secret db: line 2: write NAME=value; a name has letters, digits and _, and no digit first\n",
    )
    name = await cli("secret", "set", "a/b", "-f", "-", stdin="A=1")
    assert "'a/b' can't name a secret; a name has 1 to 128 ASCII letters, digits, '_', '.' and '-'" in name.err
    missing = await cli("secret", "set", "db", "-f", str(tmp_path / "none"))
    assert "can't be read: No such file or directory" in missing.err
    comments = await cli("secret", "set", "db", "-f", "-", stdin="# nothing\n")
    assert "secret db: has no line NAME=value" in comments.err
    wrong = await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=MANIFEST.replace("consul: shop-db", "consul: a/b"))
    assert wrong.code == 1
    assert "env_from[0]: consul: not the key of a secret" in wrong.err
    both = await cli(
        "rc", "apply", "-f", "-", "-y", "-d", stdin=MANIFEST.replace("consul: shop-db", "consul: a, file: /b")
    )
    assert "env_from[0]: give `file`, the path of a file on the node, or `consul`, the key of a secret" in both.err
    assert (await cli("secret", "policy", "db", "api")).out.splitlines() == [
        'key "fleet-secrets/db" { policy = "read" }',
        'key "fleet-secrets/api" { policy = "read" }',
    ]
    assert not (await cli.store.list(cli.keys.secrets)).entries
