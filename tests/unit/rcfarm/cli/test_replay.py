"""`rcfarm replay` on the folder of a log: what is identical, what differs, what can't be read, and its exit codes."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from rcfarm.farm.decision_log import DecisionLog
from rcfarm.farm.decisions import FRAME
from rcfarm.farm.planner import PlanInput, plan
from rcfarm.farm.replay import segments
from rcfarm.farm.rollout import Placement
from scheduler.protocol import Eligibility
from store.schema.records import RCSpec
from tests.support.programs import cli
from tests.support.programs.cli import Ran

NODES = ("node-1", "node-2", "node-3")


@pytest.fixture
async def ids(tmp_path: Path) -> list[str]:
    """Log a decision of `web` that the planner makes, one of `db` that it does not, and a later one of `web`."""
    log = DecisionLog(tmp_path, "farm-a", "0", max_size=2**20, max_age=1e9, now=lambda: 1_800_000_000.0)
    eligibility = Eligibility(frozenset(NODES), NODES)
    found: list[str] = []
    for rc, current in (("web", {}), ("db", {}), ("web", {"node-1": Placement("a" * 64, "passing")})):
        given = PlanInput(RCSpec(id=rc, manifest="a" * 64, replicas_desired=2), current, eligibility, now=1.8e9)
        decision = plan(given)
        if rc == "db":
            decision = replace(decision, add=("node-2", "node-3"))
        recorded = log.record(rc, given, decision)
        assert recorded
        log.written(recorded, len(found) + 7)
        found.append(recorded.id)
    await log.flush()
    return found


def run(directory: Path, *arguments: str) -> Ran:
    return cli.run("replay", "--log", str(directory), *arguments)


def test_an_identical_decision(tmp_path: Path, ids: list[str]) -> None:
    ran = run(tmp_path, ids[0])
    assert ran.code == 0
    for line in (
        f"decision {ids[0]} of rc web, by farm-a (0), 2027-01-15T08:00:00.000Z",
        "  transaction 7",
        "  spec: 2 replicas, revision 1, manifest aaaaaaaaaaaa",
        "  nodes: 3 eligible, 3 of them may take pods",
        "plan: add node-1, node-2",
        "  starting: 2 of 2 pods are not reported by their agents yet: node-1, node-2",
    ):
        assert line in ran.out.splitlines()
    assert "identical: " in ran.out
    assert "unchanged: " not in ran.out, "only daemon sets look at it"
    assert run(tmp_path, ids[0], "-o", "json").json["given"]["spec"]["id"] == "web"


def test_a_decision_that_this_version_does_not_make(tmp_path: Path, ids: list[str]) -> None:
    ran = run(tmp_path, ids[1])
    assert ran.code == 2
    assert '  add: ["node-2","node-3"] was logged, now it is ["node-1","node-2"]' in ran.out.splitlines()
    assert run(tmp_path, ids[1], "-o", "json").json["differences"] == {
        "add": [["node-2", "node-3"], ["node-1", "node-2"]]
    }


def test_lists_and_counts(tmp_path: Path, ids: list[str]) -> None:
    assert [each["id"] for each in run(tmp_path, "--rc", "web", "-o", "json").json] == [ids[0], ids[2]]
    assert [each["id"] for each in run(tmp_path, "--since", "2027-01-01", "-o", "json").json] == ids
    assert run(tmp_path, "--rc", "web", "--since", "2027-02-01", "-o", "json").json == []
    every = run(tmp_path, "--all")
    assert (every.code, every.out.startswith("2 of 3 decisions identical")) == (2, True)
    assert run(tmp_path, "--all", "-o", "json").json["different"] == [ids[1]]
    assert run(tmp_path, "--all", "--rc", "web").code == 0


def test_what_is_damaged_is_named(tmp_path: Path, ids: list[str]) -> None:
    [path] = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    ran = run(tmp_path, "--all")
    assert (ran.code, ran.out) == (1, "0 of 0 decisions identical with version 0.1.0\n")
    assert ran.err.startswith(f"left out: {path.name}: its end, from byte 19, is cut off")
    assert run(tmp_path, ids[0]).code == 1
    path.write_bytes(b"something else")
    assert "not a decision log" in run(tmp_path, "--rc", "web").err


@pytest.mark.parametrize("kept", [0, 5])
def test_zeros_are_damage(tmp_path: Path, ids: list[str], kept: int) -> None:
    """A machine that loses power may leave zeros where the end of the file was to be, or after a part of it."""
    [path] = segments(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) if kept else 19] + bytes(500))
    ran = run(tmp_path, "--all")
    assert (ran.code, ran.out.split()[:3]) == (1, ["2", "of", "3"] if kept else ["0", "of", "0"])
    assert ran.err == f"left out: {path.name}: from byte {len(raw) if kept else 19} on it is damaged\n"


def test_a_part_with_a_right_checksum_and_no_sense_is_damage(tmp_path: Path, ids: list[str]) -> None:
    [path] = segments(tmp_path)
    at = len(path.read_bytes())
    with path.open("ab") as file:
        file.write(FRAME.pack(3, zlib.crc32(b"???")) + b"???")
    ran = run(tmp_path, "--all")
    assert (ran.code, ran.out.split()[:3]) == (1, ["2", "of", "3"])
    assert ran.err == f"left out: {path.name}: the part at byte {at} is damaged\n"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, ids: list[str]) -> None:
    os.mkfifo(tmp_path / "01ZZ.decisions")
    ran = run(tmp_path, "--all")
    assert (ran.code, ran.out.split()[:3]) == (1, ["2", "of", "3"])
    assert ran.err == f"left out: {tmp_path / '01ZZ.decisions'}: can't be read: not a file\n"


def test_without_a_folder_it_reads_the_log_of_the_store_that_commands_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of `rcfarm dev`; where there is none, the error says how to name a farm's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RCFARM_STORE", raising=False)
    ran = cli.run("replay", "--all")
    assert ran.err.startswith(f"error: {tmp_path}/state/rcfarm/dev/decisions: the decision log can't be read")
    assert "name the folder of a farm's with --log" in ran.err
    monkeypatch.setenv("RCFARM_STORE", f"embedded:{tmp_path}/elsewhere")
    assert cli.run("replay", "--all").err.startswith(f"error: {tmp_path}/elsewhere/decisions: ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "name a decision, or say which: --rc RC, --since TIME or --all"),
        (("ab12", "--all"), "name a decision, or say which: --rc RC, --since TIME or --all"),
        (("ab12",), "has no decision ab12; `rcfarm replay --rc RC` lists those of an RC"),
        (("--since", "yesterday"), "--since 'yesterday': write"),
    ],
)
def test_bad_input(tmp_path: Path, ids: list[str], arguments: tuple[str, ...], error: str) -> None:
    ran = run(tmp_path, *arguments)
    assert (ran.code, ran.out) == (1, "")
    assert error in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    assert "there is no decision log" in run(tmp_path, "--all").err
    assert "can't be read: No such file or directory" in run(tmp_path / "none", "--all").err
    assert run(tmp_path, "--all").code == 1
