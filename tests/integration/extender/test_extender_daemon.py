"""`rcfarm extender` as a process, without a cluster: its start, its messages, its end."""

from __future__ import annotations

import http.client
import subprocess
import sys
from pathlib import Path

from tests.support.consul.server import free_ports
from tests.support.programs.daemon import running

CONFIG = """\
kubeApiServerAddress: http://127.0.0.1:{api}
webServerAddress: 127.0.0.1:{web}
physicalCluster:
  cellTypes:
    HOST: {{childCellType: GPU, childCellNumber: 4, isNodeLevel: true}}
  physicalCells:
  - {{cellType: HOST, cellAddress: a0}}
virtualClusters:
  vision: {{virtualCells: [{{cellType: HOST, cellNumber: 1}}]}}
"""
OUTSIDE = {"KUBECONFIG": "", "HOME": "/nonexistent"}  # the file alone says where the API server is


def test_it_starts_without_its_api_server_and_ends_in_order(tmp_path: Path) -> None:
    """HiveD's configuration file is enough to start; both listeners report what is missing; SIGTERM ends it with 0,
    although kube-scheduler keeps its connections open."""
    api, web = free_ports(2)
    (tmp_path / "hived.yaml").write_text(CONFIG.format(api=api, web=web))
    with running(tmp_path, "extender", "--config", str(tmp_path / "hived.yaml"), environ=OUTSIDE) as daemon:
        daemon.until(lambda: f"127.0.0.1:{api}" in daemon.get("/readyz")[1], "readiness names the API server")
        assert daemon.get("/livez")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", web, timeout=10)
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        assert (answer.status, f"127.0.0.1:{api}" in answer.read().decode()) == (503, True)
        connection.request("GET", "/v1/inspect/clusterstatus/physicalcluster")
        answer = connection.getresponse()
        assert (answer.status, b"not all nodes and pods are known yet" in answer.read()) == (503, True)
        assert daemon.stop() == 0
        connection.close()
    assert "Traceback" not in daemon.log()


def test_a_wrong_file_is_reported_in_one_message(tmp_path: Path) -> None:
    """One message lists every error; exit code 1, no traceback."""
    (tmp_path / "hived.yaml").write_text(CONFIG.format(api=1, web="x").replace("cellNumber: 1", "cellNumber: 2"))
    command = [sys.executable, "-m", "rcfarm", "extender", "--config", str(tmp_path / "hived.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    first, *others = ended.stderr.splitlines()
    assert first == f"error: {tmp_path / 'hived.yaml'} can't be used:"
    assert [line.partition(": ")[0] for line in others] == [
        "  webServerAddress",
        "  virtualClusters.vision.virtualCells[0].cellNumber",
    ]
    assert "Traceback" not in ended.stderr


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    """The message names the file and the other ways to configure it."""
    command = [sys.executable, "-m", "rcfarm", "extender", "--config", str(tmp_path / "none.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        f"error: {tmp_path / 'none.yaml'}: can't be read: No such file or directory; name HiveD's file with --config, "
        "or in the environment as CONFIG\n",
    )
