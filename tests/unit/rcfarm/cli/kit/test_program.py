"""The program as a shell sees it: imports, exit codes, completion."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from rcfarm.cli.kit import output
from rcfarm.cli.kit.options import confirm
from rcfarm.cli.kit.output import Output
from store.schema.records import Capacity, NodeSpec, encode
from tests.support.programs.cli import CommandLine, Ran, run_process

MANIFEST = b'{"id":"hello","launchables":{"web":{"command":["true"]}}}'
HEAVY = {"aiohttp", "consul", "kubernetes_asyncio", "msgspec", "rich", "structlog", "yaml", "requests"}


def rcfarm(*arguments: str, **environ: str) -> Ran:
    return run_process(*arguments, env={"HOME": "/nonexistent", **environ})


def imported(*arguments: str) -> set[str]:
    """Return the modules that a process has imported once the command has ended."""
    code = (
        "import sys\n"
        f"sys.argv = ['rcfarm', *{arguments!r}]\n"
        "from rcfarm.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(ran.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help is quick because it imports none of the heavy libraries."""
    assert HEAVY & imported(*arguments) == set()


@pytest.mark.parametrize(
    "command", ["rc apply", "task run", "quota set", "node list", "status", "doctor", "hived explain", "farm", "dev"]
)
def test_a_command_is_imported_without_its_client(command: str) -> None:
    """Help, completion and a wrong option of a command need no HTTP client, and nothing that draws tables; those of
    most commands, no YAML, nor daemons' settings. No command needs what structlog and typer import for programs of
    another kind."""
    unneeded = {"aiohttp", "pydantic", "pygments", "rich.traceback", "rich.console"}
    unneeded |= set() if command in ("hived explain", "farm", "dev") else {"yaml", "rcfarm.config.settings"}
    assert unneeded & imported(*command.split(), "--help") == set()


@pytest.mark.parametrize(
    ("store", "client"), [("memory:", "store.consul.client"), ("consul://127.0.0.1:1", "store.embedded.store")]
)
def test_a_command_imports_the_client_of_its_store_alone(store: str, client: str) -> None:
    """None of them is aiohttp, which takes as long as all the rest of a short command."""
    assert {"aiohttp", client} & imported("rc", "list", "--store", store) == set()


@pytest.mark.parametrize(
    "group",
    [
        [],
        ["rc"],
        ["task"],
        ["quota"],
        ["schedule"],
        ["node"],
        ["pod"],
        ["events"],
        ["farm", "forget"],
        ["brake"],
        ["audit"],
        ["status"],
        ["doctor"],
        ["hived"],
        ["framework"],
        ["job"],
        ["farm"],
        ["agent"],
        ["dev"],
        ["ready"],
    ],
)
def test_every_command_has_help(group: list[str]) -> None:
    """Every command and every command of a group describes itself and its options."""
    ran = rcfarm(*group, "--help")

    assert ran.code == 0, ran.err
    assert ran.out.startswith("Usage: ")
    assert "Options:" in ran.out
    cut = [line for line in ran.out.splitlines()[1:] if line.endswith("...")]
    assert not cut, "the first sentence says what a command does, on 80 columns"


def test_a_wrong_command_line_exits_with_1() -> None:
    """2 means "not fully placed"; a mistyped command must not look like it."""
    assert rcfarm("rc", "scale", "web").code == 1
    assert rcfarm("nonsense").code == 1
    assert "No such option: --bogus" in rcfarm("rc", "list", "--bogus").err


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    """`rcfarm … | head -1` prints no error when the reader closes the pipe."""
    script = f"{sys.executable} -m rcfarm --help | true; {sys.executable} -m rcfarm --help >&-"
    for _ in range(3):
        ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert ran.stderr == ""


def test_without_any_store_the_error_says_how_to_name_one() -> None:
    """A new user without `rcfarm dev` gets one line, no traceback."""
    ran = rcfarm("rc", "list")

    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "start it, or name a store with --store or RCFARM_STORE" in ran.err


@pytest.mark.parametrize("role", ["farm", "agent", "dev"])
def test_wrong_settings_of_a_daemon_are_one_line(role: str) -> None:
    """The error names the flag or variable; nothing is started."""
    ran = rcfarm(role, "--set", "session.ttl=1")

    assert ran.code == 1
    assert ran.err.startswith("error: session.ttl: 1 s must be between"), ran.err
    assert ran.err.count("\n") == 1


async def _complete(cli: CommandLine, line: str, **environ: str) -> list[str]:
    variables = {
        "_RCFARM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "RCFARM_STORE": cli.url,
        "RCFARM_STORE_ROOT": cli.keys.root,
        **environ,
    }
    ran = await asyncio.to_thread(rcfarm, **variables)
    return ran.out.split()


async def test_completion_knows_commands_rcs_and_nodes(cli: CommandLine) -> None:
    """Commands complete without the store; ids and names come from it."""
    await cli.rcs.create(MANIFEST, rc_id="web-1")
    await cli.rcs.create(MANIFEST, rc_id="worker")
    await cli.store.put(cli.keys.node_spec("node-1"), encode(NodeSpec(name="node-1")))

    assert {"scale", "apply", "delete"} <= set(await _complete(cli, "rcfarm rc "))
    assert await _complete(cli, "rcfarm rc scale w") == ["web-1", "worker"]
    assert await _complete(cli, "rcfarm rc status web") == ["web-1"]
    assert await _complete(cli, "rcfarm node cordon ") == ["node-1"]


async def test_completion_without_a_store_is_empty_and_quick(cli: CommandLine) -> None:
    """Without a store, completion returns nothing, quickly and without an error."""
    assert await _complete(cli, "rcfarm rc scale ", RCFARM_STORE="consul://127.0.0.1:9") == []
    assert await _complete(cli, "rcfarm rc scale ", RCFARM_STORE="nonsense") == []


def test_tables_align_and_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Off a terminal, tables have no escape codes and no trailing blanks, are not cut, and align numbers right."""
    Output().table(("NAME", "COUNT>", "NOTE"), [("a", "1", "x" * 300), ("longer", "1000", "")])

    assert capsys.readouterr().out.splitlines() == [
        "NAME    COUNT  NOTE",
        "a           1  " + "x" * 300,
        "longer   1000",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "now"), (1, "1s ago"), (59, "59s ago"), (61, "1m ago"), (7200, "2h ago"), (2e5, "2d ago")]
)
def test_times_are_relative_to_now(seconds: float, text: str) -> None:
    """Times are shown in the largest unit that fits."""
    now = datetime(2026, 1, 1, tzinfo=UTC)

    assert output.ago((now - timedelta(seconds=seconds)).isoformat(), now) == text


def test_odd_times_are_shown_as_they_are() -> None:
    """An empty time is a dash; text that is not a time is shown unchanged."""
    assert (output.ago(""), output.ago("yesterday")) == ("-", "yesterday")


def test_amounts_are_words() -> None:
    """Durations, counts, labels and capacities are readable."""
    assert [output.seconds(value) for value in (0.44, 12.4, 185)] == ["0.4s", "12s", "3m 5s"]
    assert [output.count(number, "pod") for number in (0, 1, 2)] == ["0 pods", "1 pod", "2 pods"]
    assert (output.labels({}), output.labels({"b": "2", "a": "1"})) == ("-", "a=1,b=2")
    assert output.capacity(Capacity()) == "-"
    assert output.capacity(Capacity(1500, 3 * 2**29, {"gpu": 2})) == "1.5 cores, 1.5 GiB, 2 gpu"


async def test_a_ctrl_c_just_before_a_question_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio's handler only cancels the task, which would not notice before the answer."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    task = asyncio.current_task()
    assert task is not None
    task.cancel()

    with pytest.raises(KeyboardInterrupt):
        confirm("Delete all?", yes=False)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    task.uncancel()
