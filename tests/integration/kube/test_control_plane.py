"""The control plane of the test suite has the properties that other tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
from pathlib import Path

import psutil
import pytest

from store.kube.api.objects import Resource
from tests.support.kube.control_plane import ControlPlane, until
from tests.support.kube.custom_resources import definition

WIDGETS = Resource("test.rcfarm.dev", "v1", "widgets", "Widget")


def test_a_user_may_do_what_its_rules_say(control_plane: ControlPlane, namespace: str) -> None:
    """A limited token reads what its rules allow, and is forbidden the rest; a revoked token is unknown."""
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]
    token = control_plane.create_user(rules, namespace=namespace)
    listing = f"/api/v1/namespaces/{namespace}/configmaps"
    assert control_plane.request("GET", listing, token=token)["kind"] == "ConfigMapList"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        control_plane.request("GET", f"/api/v1/namespaces/{namespace}/pods", token=token)
    unused = control_plane.create_user(rules, namespace=namespace)
    control_plane.revoke_user(unused)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        control_plane.request("GET", listing, token=unused)


def test_owned_objects_of_a_new_kind_are_collected(control_plane: ControlPlane, namespace: str) -> None:
    """Right after a kind was installed, deleting one of it takes what it owns along."""
    control_plane.install(definition(WIDGETS))
    widgets = WIDGETS.path(namespace)
    kind = {"apiVersion": WIDGETS.api_version, "kind": WIDGETS.kind}
    uid = control_plane.request("POST", widgets, {**kind, "metadata": {"name": "owner"}})["metadata"]["uid"]
    owner = {**kind, "name": "owner", "uid": uid}
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    control_plane.request("POST", maps, {"metadata": {"name": "owned", "ownerReferences": [owner]}})
    control_plane.request("DELETE", f"{widgets}/owner")
    until(lambda: not control_plane.exists(f"{maps}/owned"), "collected")


def test_data_survives_a_crash_of_every_part(own_control_plane: ControlPlane) -> None:
    """etcd and the API server come back at the same address, with all acknowledged data."""
    plane, maps = own_control_plane, "/api/v1/namespaces/default/configmaps"
    plane.request("POST", maps, {"metadata": {"name": "kept"}})
    plane.etcd.kill()
    plane.etcd.start()
    plane.restart_apiserver()
    assert plane.request("GET", f"{maps}/kept")["metadata"]["name"] == "kept"
    plane.compact()


def test_servers_never_outlive_their_tests(tmp_path: Path) -> None:
    """The servers end also when the process that started them is killed."""
    script = (
        "import sys, signal\nfrom pathlib import Path\n"
        "from tests.support.programs.server_process import Lifeline, ServerProcess\n"
        "directory = Path(sys.argv[1])\nlifeline = Lifeline(directory)\n"
        "server = ServerProcess('sleep', directory, lambda: ['sleep', '600'])\nserver.start()\n"
        "print(server.pid, flush=True)\nsignal.pause()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert starter.stdout is not None
    server = int(starter.stdout.readline())
    assert psutil.pid_exists(server)
    os.kill(starter.pid, signal.SIGKILL)
    starter.communicate()
    until(lambda: not psutil.pid_exists(server), "killed")
