"""Task engines on a Consul with access control: the documented policies suffice, and what is denied has a name."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.support.consul.policies import documented_policy, token_file
from tests.support.consul.server import StartConsul
from tests.support.programs.cli import run_process
from tests.support.programs.daemon import running

WORK = """
quota: gpu
units: 1
---
task: first
quotas: {gpu: 1}
retries: 1
cache_version: "1"
process: {command: [sh, -c, 'test $RCFARM_ATTEMPT = 1']}
---
task: second
quotas: {gpu: 1}
depends_on: [first]
process: {command: ["true"]}
---
task: deploy
rc: {rc: {id: web, replicas: 1, manifest: {id: web, launchables: {main: {command: [sleep, "1000"]}}}}}
---
schedule: often
cron: "0 3 1 1 *"
overlap: allow
task: {process: {command: ["true"]}}
"""


def test_the_documented_policies_suffice(start_consul: StartConsul, tmp_path: Path) -> None:
    """With exactly these permissions tasks of every kind of work in the store run, under a quota and on a schedule."""
    server = start_consul(acl=True)
    tokens = {name: server.create_token(documented_policy(name)) for name in ("farm", "tasks", "agent", "operator")}
    work = tmp_path / "work.yaml"
    work.write_text(WORK)
    at = ("--store", server.url)
    state = str(tmp_path / "state")
    data = str(tmp_path / "data")
    operator = {**token_file(tmp_path, tokens, "operator"), "RCFARM_STORE": server.url}
    with ExitStack() as daemons:
        logs = []
        for name, policy, arguments in (
            ("engine", "tasks", ("tasks", "--name", "engine-1", "--data", data)),
            ("farm", "farm", ("farm",)),
            ("node", "agent", ("agent", "--node", "node-1", "--state-dir", state)),
        ):
            environ = token_file(tmp_path, tokens, policy)
            daemon = daemons.enter_context(running(tmp_path / name, *arguments, *at, environ=environ))
            daemon.until_ready()
            logs.append(daemon)
        engine = logs[0]
        applied = run_process("apply", "-f", str(work), "--yes", "--detach", env=operator)
        assert applied.code == 0, applied.err
        fired = run_process("schedule", "trigger", "often", "--force", env=operator)
        assert fired.code == 0, fired.err

        def states() -> dict[str, str]:
            listed = run_process("task", "list", "-o", "json", env=operator)
            return {each["id"]: each["state"] for each in listed.json}

        def all_done() -> bool:
            found = states()
            once = [found.get(each) for each in ("first", "second", "deploy")]
            return once == ["succeeded"] * 3 and any(
                each.startswith("often-") and state == "succeeded" for each, state in found.items()
            )

        engine.until(all_done, "every task has succeeded")
        removed = run_process("task", "delete", "second", "--yes", env=operator)
        assert removed.code == 0, removed.err
        engine.until(lambda: "second" not in states(), "second is removed")
        assert run_process("rc", "delete", "web", "--yes", env=operator).code == 0
        log = "".join(daemon.log() for daemon in logs)
        assert "enied" not in log
        assert not any(token in log for token in tokens.values())
        assert [daemon.stop() for daemon in logs] == [0, 0, 0]

    examined = run_process("doctor", env={**operator, **token_file(tmp_path, tokens, "tasks")})
    assert "may not write rcfarm/tasks" not in examined.out
    assert "✓ permissions  this token may write everything that concerns tasks" not in examined.out
    assert "! permissions  may not write rcfarm/task-pods" in examined.out
    assert "! permissions  may not write rcfarm/engines" not in examined.out
    reader = server.create_token('key_prefix "rcfarm/" { policy = "read" }')
    (tmp_path / "reader").write_text(reader)
    examined = run_process("doctor", env={**operator, "CONSUL_HTTP_TOKEN_FILE": str(tmp_path / "reader")})
    assert examined.code == 1
    for tree in ("tasks", "quota", "schedules"):
        assert f"✗ permissions  may not write rcfarm/{tree}: " in examined.out
    assert "! permissions  may not write rcfarm/task-events" in examined.out
