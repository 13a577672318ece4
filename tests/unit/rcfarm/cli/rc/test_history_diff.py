"""`rcfarm rc history --diff`."""

from __future__ import annotations

from tests.support.programs.cli import CommandLine

MANIFEST = b'{"id":"web","launchables":{"main":{"command":["serve"]}}}'


async def test_each_change_is_shown_with_its_difference(cli: CommandLine) -> None:
    """Fields of the spec and of the manifest; what changed nothing of them is left out."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)
    await cli.rcs.set_replicas("web", 3)
    await cli("rc", "lock", "web", "--reason", "x")
    await cli("rc", "unlock", "web")
    await cli.rcs.set_manifest("web", MANIFEST.replace(b"serve", b"other"))

    ran = await cli("rc", "history", "web", "--diff")

    assert ran.code == 0
    created, scaled, changed = ran.out.split("\n\n")
    assert "created  by test" in created
    assert "  +replicas_desired: 2\n" in created
    assert "  +    main:\n" in created
    assert scaled.splitlines()[1:] == ["  -replicas_desired: 2", "  +replicas_desired: 3"]
    assert "  -      - serve\n  +      - other" in changed
    last = await cli("rc", "history", "web", "--diff", "--last", "1", "-o", "json")
    assert [each["event"]["event_type"] for each in last.json] == ["REPLICATION_CONTROLLER_CHANGED"]
    assert "+      - other" in last.json[0]["diff"]


async def test_a_manifest_that_is_gone_is_named(cli: CommandLine) -> None:
    """Its digest stands in its place."""
    first = await cli.rcs.create(MANIFEST, rc_id="web")
    await cli.rcs.set_manifest("web", MANIFEST.replace(b"serve", b"other"))
    await cli.store.delete(cli.keys.manifest(first.manifest))

    ran = await cli("rc", "history", "web", "--diff", "--last", "1")

    assert f"  -manifest: {first.manifest[:12]}, which is not kept any more\n" in ran.out


async def test_a_history_without_changes_says_so(cli: CommandLine) -> None:
    await cli.rcs.create(MANIFEST, rc_id="web")
    ran = await cli("rc", "history", "nope", "--diff")
    assert (ran.code, ran.err) == (1, "error: the audit log has no event of rc nope\n")
