"""Deliberate attacks of pods and their artifacts on a node agent affect nothing but the pod itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from tests.support.agent.agents import AgentHarness, alive, harness, manifest
from tests.support.agent.archives import Member, hostile, pack

REPOSITORY = Path(__file__).parents[3]
MiB = 1024 * 1024
NEST = "import os, time\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nprint('full', flush=True)\n"
LENGTHEN = "import os, time\nprint('hello', flush=True)\nos.ftruncate(1, 4 << 30)\ntime.sleep(1000)\n"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs processes as other users")


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A directory that every user can enter, as `/var/lib` is."""
    directory = Path(tempfile.mkdtemp(dir="/var/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@asynccontextmanager
async def program(node: AgentHarness, **changes: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run `rcfarm agent` on the node's store, with these settings; killed at the end."""
    settings = {
        "address": "127.0.0.1",
        "artifact_sources": "file:///",
        "default_user": str(os.geteuid()),
        "install_retry_cap": "5",
        **changes,
    }
    flags = [word for name, value in settings.items() for word in ("--set", f"agent.{name}={value}")]
    assert isinstance(node.store, EmbeddedStore)
    async with serve_consul_api(node.store) as address:
        where = ["--store", f"consul://{address}", "--node", node.node, "--state-dir", str(node.state_dir)]
        command = [sys.executable, "-m", "rcfarm", "agent", *where, "--listen", "off", *flags]
        process = subprocess.Popen(command, cwd=REPOSITORY)
        try:
            yield process
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


def artifact(path: Path) -> dict[str, Any]:
    """Return a launchable's field for that file."""
    return {"artifact": {"url": f"file://{path}", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}


def memory(process: subprocess.Popen[bytes]) -> int:
    """Return the peak memory of the process in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Ask the process to stop. Return its exit code."""
    process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(process.wait, 60)


async def test_hostile_archives_harm_only_their_own_pods(node: AgentHarness, tmp_path: Path) -> None:
    """Deep, huge and slow archives at once: each pod reports why it is refused, another one starts, the agent stays
    small, stops in time and starts again."""
    archives = hostile(tmp_path)
    good = pack(tmp_path / "good.tar", Member("run", b"#!/bin/sh\nexec sleep 1000\n", mode=0o755))
    async with program(node) as agent:
        for name, (path, _) in archives.items():
            await node.intend(manifest(name, launchable=artifact(path)), rc=name)
        await node.intend(manifest("good", ["./run"], launchable=artifact(good)), rc="good")
        await node.until_running(pod_id="good")
        for name, (_, reason) in archives.items():
            reality = await node.until(lambda it: it.state == "failed", name)
            assert reason in reality.reason
        assert memory(agent) < 200 * MiB
        assert await ended(agent) == 0
    async with program(node):
        await node.intend(manifest("next"), rc="next")
        assert alive((await node.until_running(pod_id="next")).pid)


async def test_pipes_as_artifacts_stop_nothing(node: AgentHarness, tmp_path: Path) -> None:
    """Ten artifacts that are pipes without a writer are refused, while another pod starts; SIGTERM still works."""
    os.mkfifo(tmp_path / "pipe")
    fields = {"artifact": {"url": f"file://{tmp_path}/pipe", "sha256": "0" * 64}}
    good = pack(tmp_path / "good.tar", Member("file", b"x"))
    async with program(node) as agent:
        for number in range(10):
            await node.intend(manifest(f"bad-{number}", launchable=fields), rc=f"bad-{number}")
        await node.intend(manifest("good", launchable=artifact(good)), rc="good")
        await node.until_running(pod_id="good")
        await node.until(lambda it: "it is not a regular file" in it.reason, "bad-9")
        await node.unintend("good")
        await node.until_gone("good")
        assert await ended(agent) == 0


async def test_files_of_the_node_are_no_artifacts_unless_allowed(node: AgentHarness, tmp_path: Path) -> None:
    """By default nothing is read from the node's disks, and no digest of a local file is revealed; a link does not lead
    out of the allowed directory."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    fields = {"artifact": {"url": f"file://{tmp_path}/secret", "sha256": "0" * 64}}
    async with program(node, artifact_sources="https://,http://"):
        await node.intend(manifest(launchable=fields))
        reality = await node.until(lambda it: it.state == "failed")
        assert "agent.artifact_sources allows https://, http://" in reality.reason
    async with program(node, artifact_sources=f"file://{tmp_path}/open/"):
        await node.until(lambda it: f"allows file://{tmp_path}/open/" in it.reason)
        fields["artifact"]["url"] = f"file://{tmp_path}/open/link"
        await node.intend(manifest(launchable=fields))
        await node.until(lambda it: "a link to a place that agent.artifact_sources does not allow" in it.reason)


async def test_a_very_deep_directory_is_removed(node: AgentHarness) -> None:
    """A pod's 3,000 nested directories are removed with the pod; so are those in the cache of an earlier agent."""
    left = node.state_dir / "artifacts" / "tmp" / "left"
    left.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", NEST], cwd=left, check=True)
    async with program(node):
        await node.run_pod(manifest(command=["python3", "-c", NEST + "time.sleep(1000)"]))
        await until(node, lambda: "full" in node.log())
        await node.unintend()
        await node.until_gone()
        assert not (node.state_dir / "pods" / "web").exists()
        trash = [node.state_dir / area / ".trash" for area in ("artifacts", "pods")]
        await until(node, lambda: not any(any(directory.iterdir()) for directory in trash))
        await node.run_pod(manifest())


async def test_a_long_log_takes_no_room(node: AgentHarness) -> None:
    """A process that extends its log to 4 GiB by one call makes the agent write almost nothing."""
    async with program(node, log_size=str(MiB)):
        await node.intend(manifest(command=["python3", "-c", LENGTHEN]))
        log = await node_log(node)
        await until(node, lambda: log.stat().st_size < MiB and log.with_name("main.log.1").exists() is False)
        assert used(log.parent) < MiB


async def test_a_fast_log_is_bounded_and_keeps_its_end(node: AgentHarness) -> None:
    """A process that writes half a gigabyte at full speed leaves a log within its limit that includes its last line."""
    shout = "head -c 500000000 /dev/zero; echo; echo done; sleep 1000"
    async with program(node, log_size=str(MiB), log_files="4"):
        await node.intend(manifest(command=["sh", "-c", shout]))
        log = await node_log(node)
        await until(node, lambda: b"done" in b"".join(last(path) for path in log.parent.iterdir()))
        await until(node, lambda: log.stat().st_size <= MiB and used(log.parent) <= 9 * MiB)
        assert any(b"done" in last(path) for path in log.parent.iterdir())


@root_only
async def test_nothing_runs_as_root_by_omission(shared_directory: Path) -> None:
    """Under a root agent a launchable without a user runs as nobody, one that names root is refused unless the node
    allows root by name, and no other user can read the artifacts."""
    store = EmbeddedStore()
    packed = pack(shared_directory / "packed.tar", Member("run", b"#!/bin/sh\nid -u\nexec sleep 1000\n", mode=0o755))
    async with harness(store, shared_directory / "node-1") as node:
        async with program(node, default_user=""):
            process = await node.run_pod(manifest(command=["./run"], launchable=artifact(packed)))
            assert Path(f"/proc/{process.pid}").stat().st_uid == 65534
            await node.intend(manifest("root", launchable={"user": "root"}), rc="rc-2")
            reality = await node.until(lambda it: it.state == "failed", "root")
            assert "launchables.main.user: this node allows no pod to run as 'root'" in reality.reason
            unpacked = next((node.state_dir / "artifacts").glob("*/run"))
            assert unpacked.stat().st_uid == 0  # the files that a pod runs belong to no pod's user
            listed = subprocess.run(
                ["ls", node.state_dir / "artifacts"], user="nobody", group=65534, check=False, capture_output=True
            )
            assert b"Permission denied" in listed.stderr
        async with program(node, default_user="", allowed_users="*,root"):
            process = await node.until_running(pod_id="root")
            assert Path(f"/proc/{process.pid}").stat().st_uid == 0
    await store.close()


async def node_log(node: AgentHarness) -> Path:
    """Return the log file of the pod, once there is one."""
    log = node.state_dir / "logs" / "web" / "main.log"
    await until(node, log.exists)
    return log


def last(path: Path) -> bytes:
    """Return the last bytes of a file that may be very large; none of one that a rotation has just renamed."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 100))
        return file.read()
    return b""


def used(directory: Path) -> int:
    """Return the disk space of a directory's files in bytes."""
    blocks = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been renamed
            blocks += path.stat().st_blocks
    return 512 * blocks


async def until(node: AgentHarness, condition: Any) -> None:
    def look() -> bool:
        try:
            return bool(condition())
        except FileNotFoundError:  # rotated in between
            return False

    await node.eventually(look)
