"""Farms and agents as processes: how they start, report their state, and stop."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.consul.policies import documented_policy, token_file
from tests.support.consul.server import ConsulServer, StartConsul
from tests.support.programs.cli import Ran, run_process
from tests.support.programs.daemon import running


def rcfarm(*arguments: str, **environ: str) -> Ran:
    """Run a command that is expected to end on its own."""
    return run_process(*arguments, env=environ)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_farm_reports_its_state_to_the_service_manager(tmp_path: Path, number: signal.Signals) -> None:
    """READY after the start, a heartbeat while it works, STOPPING at the end; exit code 0 and no traceback."""
    with running(tmp_path, "farm", "--store", "memory:") as farm:
        farm.until_notified("READY=1")
        assert farm.get("/readyz")[0] == 200
        assert "STATUS=Ready" in farm.notifications
        farm.notifications.clear()
        farm.until_notified("WATCHDOG=1")
        assert farm.get("/livez") == (200, "ok\n")
        assert "rcfarm_session_held 1.0" in farm.get("/metrics")[1]
        assert farm.stop(number) == 0
        farm.until_notified("STOPPING=1")
        assert "Traceback" not in farm.log()


def test_an_agent_reports_its_state_too(tmp_path: Path) -> None:
    """An agent sends the same notifications, and its metrics carry the node's name."""
    state = str(tmp_path / "state")
    with running(tmp_path, "agent", "--store", "memory:", "--node", "n1", "--state-dir", state) as agent:
        agent.until_notified("READY=1")
        agent.until_ready()
        agent.until_notified("WATCHDOG=1")
        assert 'rcfarm_agent_registered{node="n1"} 1.0' in agent.get("/metrics")[1]
        assert agent.stop() == 0


def test_a_stopped_loop_sends_no_heartbeat(tmp_path: Path) -> None:
    """A farm that does not run any more, for whatever reason, sends no heartbeat, so that the service manager acts."""
    with running(tmp_path, "farm", "--store", "memory:") as farm:
        farm.until_ready()
        farm.pause()
        farm.until(lambda: "T (stopped)" in Path(f"/proc/{farm.pid}/status").read_text(), "stopped")
        farm.receive()
        farm.notifications.clear()
        time.sleep(2.0)  # the watchdog's time is 1.5 s: the test can only wait for the silence
        assert farm.receive() == []
        farm.resume()
        farm.until_notified("WATCHDOG=1")


def test_a_farm_that_is_killed_for_hanging_says_where_it_hung(tmp_path: Path) -> None:
    """SIGABRT, as the watchdog sends it, leaves the stack of every thread in the log."""
    with running(tmp_path, "farm", "--store", "memory:") as farm:
        farm.until_ready()
        farm.stop(signal.SIGABRT)
        assert "Fatal Python error: Aborted" in farm.log()
        assert "rcfarm/daemon/daemon.py" in farm.log()


def test_the_start_is_logged_with_version_and_store(tmp_path: Path, consul: ConsulServer) -> None:
    """The first log line names the program, its version and its store."""
    with running(tmp_path, "farm", "--store", consul.url, "--root", "start") as farm:
        farm.until_ready()
        (started,) = (json.loads(line) for line in farm.log().splitlines() if '"Started"' in line)
    assert started["store"] == consul.url
    assert started["version"] == version("rcfarm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[farm]\nnodes_lost_after = 3\n",
            r"farm\.toml:2: farm\.nodes_lost_after is not a setting; did you mean node_lost",
        ),
        ("[session]\ncheck_ttl = 20\n", r"session\.check_ttl: 20.0 s must be .* below session\.ttl \(10 s\)"),
        ("[web]\nlisten = '0.0.0.0:0'\n", r"web\.listen: 0\.0\.0\.0 is reachable .* a token is required"),
        ("[farm]\nselector = 'a=b,,'\n", r"farm\.selector: "),
    ],
)
def test_wrong_settings_end_the_start_with_one_line(tmp_path: Path, text: str, message: str) -> None:
    """Exit code 1, and one line that names the key, the file and the remedy."""
    (tmp_path / "farm.toml").write_text(text)
    result = rcfarm("farm", "--store", "memory:", "--config", str(tmp_path / "farm.toml"))

    assert result.code == 1
    assert re.search(message, result.err)
    assert len(result.err.splitlines()) == 1


def test_a_port_in_use_ends_the_start(tmp_path: Path) -> None:
    """The log names the setting, the address and the reason; the farm does no work."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = rcfarm("farm", "--store", "memory:", "--listen", f"127.0.0.1:{port}")

    assert result.code == 1
    assert f"web.listen: can't listen on 127.0.0.1:{port}" in result.err
    assert "Traceback" not in result.err
    assert "member" not in result.err


def test_consul_away_at_the_start_and_in_the_middle(start_consul: StartConsul, tmp_path: Path) -> None:
    """A farm starts without Consul, reports what it waits for, and is ready whenever Consul is; it never exits."""
    server = start_consul(durable=True)
    server.stop()
    with running(tmp_path, "farm", "--store", server.url) as farm:
        farm.until(
            lambda: f"[-] farm store: Consul at {server.address}" in farm.get("/readyz")[1], "waiting for Consul"
        )
        assert farm.get("/livez")[0] == 200
        farm.until_notified("EXTEND_TIMEOUT_USEC=30000000")
        assert "READY=1" not in farm.notifications, "the service manager must not take the farm for ready"
        server.start()
        farm.until_notified("READY=1")
        farm.until_ready()
        server.stop()
        farm.until(lambda: "can't be read: Consul at" in farm.get("/readyz")[1], "unready")
        assert farm.get("/livez")[0] == 200
        server.start()
        farm.until_ready()
        server.stop()
        assert farm.stop() == 0
        assert "Traceback" not in farm.log()


def test_the_policy_of_a_node_is_as_documented() -> None:
    """`rcfarm node policy` prints what the page shows, without a store."""
    printed = rcfarm("node", "policy", "node-1", RCFARM_STORE="consul://127.0.0.1:1")
    assert (printed.code, printed.out) == (0, documented_policy("agent"))
    refused = rcfarm("node", "policy", "../x", RCFARM_STORE="consul://127.0.0.1:1")
    assert refused.code == 1
    assert "'../x' is not a node name" in refused.err


def test_the_documented_policies_suffice(start_consul: StartConsul, tmp_path: Path) -> None:
    """With exactly these permissions a farm and an agent run an RC, on short leases; no log shows a token."""
    server = start_consul(acl=True)
    tokens = {name: server.create_token(documented_policy(name)) for name in ("farm", "agent", "operator")}
    manifest = tmp_path / "rc.yaml"
    manifest.write_text(
        "id: web\nreplicas: 1\nmanifest:\n  id: web\n  launchables:\n    main:\n      command: [sleep, '1000']\n"
        "  ports: {http: 0}\n"
    )
    with ExitStack() as daemons:
        environ = token_file(tmp_path, tokens, "farm")
        farm = daemons.enter_context(running(tmp_path / "farm", "farm", "--store", server.url, environ=environ))
        farm.until_ready()  # it writes keys that an agent may only read
        state, environ = str(tmp_path / "state"), token_file(tmp_path, tokens, "agent")
        options = ("--store", server.url, "--node", "node-1", "--state-dir", state)
        agent = daemons.enter_context(running(tmp_path / "agent", "agent", *options, environ=environ))
        agent.until_ready()
        assert "rcfarm_session_lease_seconds 3.0" in farm.get("/metrics")[1]
        operator = {**token_file(tmp_path, tokens, "operator"), "RCFARM_STORE": server.url}
        applied = rcfarm("rc", "apply", "-f", str(manifest), "--yes", "--wait-healthy", "1", **operator)
        assert applied.code == 0, applied.err
        with_exec = rcfarm("node", "policy", "node-1", "--exec", RCFARM_STORE="consul://127.0.0.1:1").out
        tokens |= {"with_exec": server.create_token(with_exec)}
        tokens |= {"reader": server.create_token('key_prefix "rcfarm/" { policy = "read" }')}
        operator["RCFARM_LISTENER_TOKEN_FILE"] = f"{state}/listener.token"
        reader = operator | token_file(tmp_path, tokens, "reader")
        assert rcfarm("rc", "logs", "web", **reader).code == 0
        denied = rcfarm("rc", "exec", "web", "--", "true", **reader)
        assert (denied.code, denied.out) == (1, "")
        assert "Permission denied" in denied.err
        refused = rcfarm("rc", "exec", "web", "--", "true", **operator)
        assert refused.code == 1
        assert "its agent may not read the audit log" in refused.err
        assert "`rcfarm node policy node-1 --exec`" in refused.err
        agent.stop()
        environ = token_file(tmp_path, tokens, "with_exec")
        agent = daemons.enter_context(running(tmp_path / "agent-2", "agent", *options, environ=environ))
        agent.until_ready()
        assert rcfarm("rc", "exec", "web", "--", "echo", "hi", **operator).out == "hi\n"
        assert has_service(server, "web")
        deleted = rcfarm("rc", "delete", "web", "--yes", **operator)
        assert deleted.code == 0, deleted.err
        logs = farm.log() + agent.log()
        shown = logs + "".join(Path(f"/proc/{one.pid}/cmdline").read_text() for one in (farm, agent))
        assert "Denied" not in logs
        assert "denied" not in logs
        assert not any(token in shown for token in tokens.values())
        assert (farm.stop(), agent.stop()) == (0, 0)


def has_service(server: ConsulServer, name: str) -> bool:
    return any(service["Service"] == name for service in server.request("GET", "/v1/agent/services").values())
