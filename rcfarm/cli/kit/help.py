"""The end of each command's `--help`: examples, and exit codes.

`EXAMPLES` is the only place for examples: a line is one, and belongs to the command that its first words name. What
follows two spaces and `#` is a remark. The exit codes come from the command's parameters, unless `EXITS` has its own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from typer.core import TyperCommand

EXAMPLES = """
dev  # a store, a farm, an engine and three nodes on this machine
dev --nodes 5 --apply web.yaml
farm --config /etc/rcfarm/farm.toml
farm forget farm-b
agent --config /etc/rcfarm/agent.toml
tasks --config /etc/rcfarm/tasks.toml
jobs --config /etc/rcfarm/jobs.toml
extender --config /etc/rcfarm/extender.toml
barrier --output-dir /mnt/barrier
ready
ready farm
status
status --watch
events --since 1h
events -f --rc web
explain web
explain node/node-1
plan -f web.yaml
what-if --drain zone=a
what-if --set replicas=10 --rc web
replay --rc web --since 1h
replay 2ad26992c2405d45
apply -f web.yaml
apply -f fleet/ -f extra.json --yes  # a folder, with those below it
apply -f - --dry-run
doctor
schema > rc.schema.json
schema manifest
rc apply -f web.yaml
rc apply -f web.yaml -f api.yaml --yes --timeout 300
rc create -m web-pod.yaml --replicas 3 --node-selector pool=web
rc edit web
rc list
rc list -l team=shop -o name
rc get web -o yaml > web.yaml
rc status web
rc status -l team=shop
rc status web --watch
rc explain web
rc history web --since 24h
rc history web --diff --last 3  # what changed, and by whom
rc owner web
rc logs web -f
rc logs web --node node-1 --previous --tail 50
rc exec web --node node-1 -- env
rc exec web -it -- sh
rc scale web 5
rc scale web api 0
rc scale -l team=shop 2 --yes
rc enable web
rc disable web
rc restart web
rc restart -l team=shop --yes
rc rollback web
rc rollback web --to 3
rc lock web --reason "incident 42: do not touch"
rc unlock web
rc delete web
rc delete -l team=shop --yes
rc restore --list
rc restore web
ds create -m logs-pod.yaml --everywhere
ds list
ds get logs
ds status logs
ds enable logs
ds disable logs
ds delete logs
ds test-selector pool=web
ds shrink logs
rollout status web
rollout history web
rollout pause web
rollout resume web
rollout promote web
rollout abort web
rollout undo web --to 3
rollout between blue green --desired 5 --minimum 4
rollout restart web
task run -- echo hello
task run -f train.yaml --timeout 3600
task submit -f train.yaml --new
task list --state live
task list -o name
task get hello
task status hello
task explain hello
task history hello
task logs hello
task abort hello --reason "wrong input"
task retry hello
task delete hello
quota set gpu 8
quota set gpu 8 --key eve=2 --weight eve=2
quota list
quota explain gpu
quota delete gpu
schedule apply -f nightly.yaml
schedule list
schedule get nightly
schedule pause nightly
schedule resume nightly
schedule trigger nightly
schedule delete nightly
secret set shop-db --file shop-db.env
secret list
secret delete shop-db
secret policy shop-db > agent-secrets.hcl
schema manifest > manifest.schema.json
node list
node list -l pool=web -o wide
node get node-1
node label node-1 pool=web old-
node cordon node-1
node uncordon node-1
node drain node-1 node-2 --wait
node drain -l rack=r7 --wait --timeout 600
node undrain node-1
node remove node-1
pod list
pod list --node node-1
pod stop node-1/web
pod where 31914
pod where node-1 31914
secret set shop-db --file db.env
secret policy shop-db > shop-db.hcl
node policy node-1 > node-1.hcl
brake status
brake engage --reason "incident 42"
brake release
audit export --since 24h > events.jsonl
job list --all-namespaces
job get mnist
job status mnist
job explain mnist
job history mnist
job logs mnist --follow
job suspend mnist
job resume mnist
job scale mnist worker=4
job delete mnist
framework list
framework get mnist
framework status mnist
framework explain mnist
framework history mnist
framework start mnist
framework scale mnist worker=4
framework logs mnist --follow
framework stop mnist
framework delete mnist
hived validate hived.yaml
hived show hived.yaml
hived explain default/train-0
hived simulate --pod pods.yaml --lose node-1
hived snapshot > snapshot.json
"""

_LATE = {2: "not complete within --timeout; the change stays"}
_CHANGED = {3: "the object was changed in between; nothing was written"}
_PLAN = {2: "something would change", 3: "an RC would not be whole in the end"}
_DAEMON = {0: "stopped by a signal", 1: "wrong settings, or an error that ended it"}
EXITS: dict[str, Mapping[int, str]] = {
    "dev": _DAEMON,
    "farm": _DAEMON,
    "agent": _DAEMON,
    "tasks": _DAEMON,
    "jobs": _DAEMON,
    "extender": _DAEMON,
    "barrier": {0: "the gang is whole", 1: "an error", 201: "not whole in time", 210: "it can never be whole"},
    "ready": {0: "each daemon that runs here is ready", 1: "one is not"},
    "doctor": {0: "no error was found", 1: "an error was found"},
    "plan": _PLAN,
    "what-if": {2: "pods would move", 3: "an RC would not be whole in the end"},
    "replay": {0: "the plan is identical", 1: "a decision can't be read", 2: "the plan differs"},
    "rc exec": {0: "the command has ended with 0; else its own code", 1: "an error, or the command's own code"},
    "task run": {0: "all have succeeded", 1: "one has not, or an error", 2: "--timeout ended before they did"},
    "task retry": {0: "it has succeeded", 1: "it has not, or an error", 2: "--timeout ended before it did"},
    "hived validate": {0: "the file can be used", 1: "it can't"},
    "hived simulate": {2: "a pod would have to wait"},
    "node drain": {2: "--wait has ended with pods that should have left; the drain goes on"},
    "rollout pause": {2: "the owner has not done it yet"} | _CHANGED,
    "rollout abort": {2: "the owner has not done it yet"} | _CHANGED,
}
_ON_RCS = frozenset({"apply", "rc", "ds", "rollout"})
_READING = frozenset({"list", "get", "status", "explain", "history", "owner", "test-selector"})


def examples_of(command: str) -> list[str]:
    """Return the examples of a command, which is given as in `rc scale`."""
    lines = [line for line in EXAMPLES.splitlines() if line]
    return [f"rcfarm {line}" for line in lines if line.split()[: len(command.split())] == command.split()]


def exits_of(command: str, parameters: Container[str]) -> dict[int, str]:
    """Return the exit codes of a command with these parameters, and what each means."""
    codes = {0: "done", 1: "an error; the reason is on standard error"}
    if command in EXITS:
        return codes | dict(EXITS[command])
    group, _, verb = command.partition(" ")
    late = _LATE if "detach" in parameters else {}
    changed = _CHANGED if group in _ON_RCS and verb not in _READING else {}
    return codes | late | changed


class HelpfulCommand(TyperCommand):
    """A command whose help ends with its examples and exit codes."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        path = ctx.command_path.partition(" ")[2]
        if examples := examples_of(path):
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in examples))
        with formatter.section("Exit codes"):
            exits = exits_of(path, {parameter.name or "" for parameter in self.params})
            formatter.write_dl([(str(code), meaning) for code, meaning in exits.items()])
        super().format_epilog(ctx, formatter)
