"""One command on several RCs, by name or by selector; no farm is there, so commands are detached."""

from __future__ import annotations

import json

import pytest

from tests.support.programs.cli import CommandLine

MANIFEST = b'{"id":"web","launchables":{"main":{"command":["serve"]}}}'


async def fleet(cli: CommandLine) -> None:
    """Create three RCs, two of the team `shop`."""
    for rc_id, team in (("api", "shop"), ("db", "data"), ("web", "shop")):
        await cli.rcs.create(MANIFEST, rc_id=rc_id, replicas=2, rc_labels={"team": team})


async def replicas(cli: CommandLine) -> dict[str, int]:
    return {spec.id: spec.replicas_desired for spec in (await cli.rcs.list()).specs}


async def test_names_and_a_selector_choose_what_is_scaled(cli: CommandLine) -> None:
    """Those that are named, once each; or those whose labels match, which are listed before they are changed."""
    await fleet(cli)

    named = await cli("rc", "scale", "web", "db", "web", "5", "--detach")
    assert (named.code, named.out) == (0, "rc web scaled\nrc db scaled\n")
    selected = await cli("rc", "scale", "-l", "team=shop", "0", "--yes", "--detach", "-o", "json")
    assert "scale 2 RCs:\n  api: from 2 to 0\n  web: from 5 to 0\n" in selected.err
    assert [(each["id"], each["action"], each["error"]) for each in selected.json] == [
        ("api", "scaled", ""),
        ("web", "scaled", ""),
    ]
    assert await replicas(cli) == {"api": 0, "db": 5, "web": 0}


async def test_one_that_fails_does_not_stop_the_others(cli: CommandLine) -> None:
    """Each is reported for itself; the exit code says that one has failed."""
    await fleet(cli)
    await cli("rc", "lock", "api", "--reason", "mine")

    ran = await cli("rc", "scale", "nope", "api", "web", "4", "--detach")

    assert (ran.code, ran.out) == (1, "rc web scaled\n")
    first, second = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert first == "error: there is no rc nope; `rcfarm rc list` shows those that exist"
    assert second.startswith("error: rc api is locked by ")
    assert await replicas(cli) == {"api": 2, "db": 2, "web": 4}

    as_json = await cli("rc", "delete", "nope", "db", "--yes", "--detach", "-o", "json")
    assert as_json.code == 1
    assert [(each["id"], each["action"]) for each in as_json.json] == [("nope", "failed"), ("db", "deleted")]
    assert json.loads(as_json.err.splitlines()[-1])["error"]["object"] == "rc nope"


@pytest.mark.parametrize("verb", [["scale", "1"], ["delete"], ["restart"]])
async def test_what_a_selector_hits_is_confirmed(cli: CommandLine, verb: list[str]) -> None:
    """Without a terminal nothing is changed; what would have been is listed."""
    await fleet(cli)

    ran = await cli("rc", verb[0], "-l", "team=shop", *verb[1:])

    assert ran.code == 1
    assert "2 RCs:\n  api" in ran.err
    assert ran.err.endswith("error: not confirmed: standard input is not a terminal; give --yes to go ahead\n")
    specs = (await cli.rcs.list()).specs
    assert [(spec.generation, spec.deleting) for spec in specs] == [(1, False)] * 3


@pytest.mark.parametrize("verb", [["scale", "1"], ["delete"], ["restart"], ["status"]])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-l", "team=nobody"], "no rc has labels that match 'team=nobody'; `rcfarm rc list -o wide` shows the labels"),
        (["-l", "team="], "no rc has labels that match"),
        (["-l", "=shop"], "=shop"),
        ([], "name the RCs, or choose them by their labels with -l SELECTOR; not both"),
        (["web", "-l", "team=shop"], "name the RCs, or choose them by their labels with -l SELECTOR; not both"),
    ],
)
async def test_a_choice_of_nothing_is_an_error(
    cli: CommandLine, verb: list[str], arguments: list[str], problem: str
) -> None:
    """One line that says what to give, and nothing is changed."""
    await fleet(cli)

    ran = await cli("rc", verb[0], *arguments, *verb[1:])

    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert problem in ran.err
    assert ran.err.count("\n") == 1
    assert await replicas(cli) == {"api": 2, "db": 2, "web": 2}


async def test_status_of_several(cli: CommandLine) -> None:
    """One after the other; JSON is a list as soon as several may be meant; names can be passed on."""
    await fleet(cli)

    both, selected = await cli("rc", "status", "web", "nope", "db"), await cli("rc", "status", "-l", "team=data")
    names = await cli("rc", "status", "-l", "team=shop", "-o", "name")

    assert both.code == 1
    assert [line.split()[0] for line in both.out.splitlines() if "  unowned  " in line] == ["web", "db"]
    assert both.err == "error: there is no rc nope; `rcfarm rc list` shows those that exist\n"
    assert (selected.code, selected.out.split()[0]) == (0, "db")
    assert names.out == "api\nweb\n"
    assert isinstance((await cli("rc", "status", "web", "-o", "json")).json, dict)
    assert isinstance((await cli("rc", "status", "-l", "team=data", "-o", "json")).json, list)


async def test_a_store_that_is_away_is_not_asked_for_each(cli: CommandLine) -> None:
    """The rest is named as not tried."""
    ran = await cli("rc", "restart", "a", "b", "c", store="consul://127.0.0.1:1")
    assert ran.code == 1
    assert ran.err.count("error: ") == 1


async def test_rollback_is_the_undo_of_a_rollout(cli: CommandLine) -> None:
    """Under the word that people type."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=1)
    await cli.rcs.set_manifest("web", MANIFEST.replace(b"serve", b"other"))

    ran = await cli("rc", "rollback", "web", "--detach")

    assert (ran.code, ran.out) == (0, "rc web changed\n")
    assert await cli.rcs.manifest((await cli.rcs.get("web")).manifest) == MANIFEST
    again = await cli("rc", "rollback", "web", "--to", "9")
    assert again.err.startswith("error: rc web: no revision 9; kept are: 2, 1; ")
