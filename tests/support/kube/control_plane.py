"""A real Kubernetes control plane for integration tests: etcd 3.4 and the API server of 1.20, with its controllers.

The programs are looked up in `RCFARM_SERVERS`, else in `.servers` of the repository, laid out by
`../shared/servers/unpack .servers`. Tests are skipped when they are missing, or fail with `RCFARM_REQUIRE_SERVERS=1`.

There are no kubelets (`tests.support.kube.hollow.kubelet` plays them), and a scheduler only after `start_scheduler`. Of
the controller manager run: garbage collector, namespaces, disruption budgets, resource quotas. The garbage collector
looks for new kinds only every 30 s: `install` restarts it, so that it knows a CRD from the start.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import yaml

from tests.support.consul.server import free_ports
from tests.support.kube import etcd_history
from tests.support.kube.certificates import Authority, Certificate, new_key
from tests.support.programs.server_process import START_TIMEOUT, Lifeline, ServerProcess, servers_directory

if TYPE_CHECKING:
    from store.kube.client.client import KubeClient

ADMIN = "admin-token"
_REPOSITORY = Path(__file__).parents[3]
_CONTROLLERS = "garbagecollector,namespace,disruption,resourcequota"
_ACCOUNT_KEY = Path("pki", "service-account.key")  # in the control plane's directory: signs tokens of service accounts
_TOKENS = Path("tokens.csv")  # in the control plane's directory: tokens that never end
_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")

Rules = Sequence[Mapping[str, Any]]


class ControlPlane:
    """One cluster. `url`, `token` (an administrator's) and `ca` are how to reach it; `kubeconfig` holds all three.

    `apiserver_flags` and `controller_manager_flags` are added to the program's own; of a flag that is given twice the
    last one counts, but controllers are added. Data survives restarts of every part.
    """

    def __init__(
        self, directory: Path, *, apiserver_flags: Sequence[str] = (), controller_manager_flags: Sequence[str] = ()
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.token = ADMIN
        self._apiserver_flags, self._controller_manager_flags = apiserver_flags, controller_manager_flags
        self._programs = servers_directory(*_PROGRAMS)
        self._authority = Authority(directory / "pki")
        self._serving = self._authority.issue("apiserver")
        new_key(directory / _ACCOUNT_KEY)
        (directory / _TOKENS).write_text(f"{ADMIN},admin,1,system:masters\n")
        self._trust = ssl.create_default_context(cafile=str(self.ca))
        self._ports: dict[str, int] = {}
        self.etcd = ServerProcess("etcd", directory, self._etcd_command, self._etcd_ready)
        self.apiserver = ServerProcess("kube-apiserver", directory, self._apiserver_command, self._apiserver_ready)
        self.controller_manager = ServerProcess("kube-controller-manager", directory, self._controller_manager_command)
        self.scheduler = ServerProcess("kube-scheduler", directory, self._scheduler_command, self._scheduler_ready)
        self._scheduler_configuration: Mapping[str, Any] = {}
        self._lifeline: Lifeline | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._ports['apiserver']}"

    @property
    def etcd_url(self) -> str:
        """The URL of etcd's HTTP gateway."""
        return f"http://127.0.0.1:{self._ports['etcd']}"

    @property
    def ca(self) -> Path:
        return self._authority.own.certificate

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig file."""
        return self.directory / "admin.kubeconfig"

    def start(self) -> None:
        """Start all but the scheduler. Return when the API is ready and has the namespace `default`, without waiting
        for the controllers."""
        self._lifeline = Lifeline(self.directory)
        for _ in range(5):
            self._ports = dict(zip(("etcd", "etcd-peer", "apiserver"), free_ports(3), strict=True))
            self.etcd.spawn()
            self.apiserver.spawn()
            if self._wait_until_ready():
                break
            self.etcd.kill()
            self.apiserver.kill()
        else:
            raise AssertionError("no free ports for a control plane")
        self.write_kubeconfig(self.kubeconfig)
        self.controller_manager.spawn()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill everything."""
        for server in (self.scheduler, self.controller_manager, self.apiserver, self.etcd):
            server.kill()
        if self._lifeline is not None:
            self._lifeline.close()

    def restart_apiserver(self) -> None:
        """Kill the API server (a clean stop would wait for open watches) and start it without its watch history."""
        self.apiserver.kill()
        self.apiserver.start()

    def restart_controller_manager(self) -> None:
        self.controller_manager.kill()
        self.controller_manager.spawn()

    def start_scheduler(self, configuration: Mapping[str, Any] | None = None) -> None:
        """Start the scheduler, or restart it with another configuration. `configuration`: keys of a
        `KubeSchedulerConfiguration`, for instance `extenders`."""
        self.scheduler.kill()
        self._scheduler_configuration = configuration or {}
        self.scheduler.start()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Any:
        """Make a plain API call, independent of the code under test. Raises `urllib.error.HTTPError` for a refusal."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        request.add_header("Authorization", f"Bearer {token or self.token}")
        request.add_header("Content-Type", content_type)
        request.add_header("Accept", accept)
        with urllib.request.urlopen(request, timeout=30, context=self._trust) as response:
            answer = response.read()
        return json.loads(answer) if answer.startswith(b"{") else answer.decode()

    def exists(self, path: str) -> bool:
        """Return whether a GET of the path finds something."""
        try:
            self.request("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return False
            raise
        return True

    def install(self, *definitions: Mapping[str, Any]) -> None:
        """Create CustomResourceDefinitions that are not there yet, and wait until the API serves them and the garbage
        collector learns of them."""
        new = [definition for definition in definitions if not self.exists(f"{_CRDS}/{definition['metadata']['name']}")]
        for definition in new:
            self.request("POST", _CRDS, definition)
        until(lambda: all(map(self._is_served, definitions)), "the new kinds served")
        if new:
            self.restart_controller_manager()

    def compact(self) -> None:
        """Make etcd forget all history: list continuations from before answer 410 from now on."""
        revision = self._etcd_request("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        self._etcd_request("/v3/kv/compaction", {"revision": revision, "physical": True})

    def create_user(self, rules: Rules, *, namespace: str, everywhere: bool = False) -> str:
        """Return the token of a new service account with the RBAC `rules`, there or `everywhere`."""
        name = f"user-{secrets.token_hex(4)}"
        self.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        kind = "ClusterRole" if everywhere else "Role"
        path = _RBAC if everywhere else f"{_RBAC}/namespaces/{namespace}"
        self.request("POST", f"{path}/{kind.lower()}s", {"metadata": {"name": name}, "rules": list(rules)})
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": name}],
        }
        self.request("POST", f"{path}/{kind.lower()}bindings", binding)
        until(lambda: self._may(f"system:serviceaccount:{namespace}:{name}", rules[0], namespace), "allowed")
        return self.new_token(namespace, name)

    def new_token(self, namespace: str, account: str) -> str:
        """Return another token of a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.request("POST", path, {"spec": {}})["status"]["token"])

    def issue_certificate(self, user: str, groups: Sequence[str] = ("system:masters",)) -> Certificate:
        """Return a client certificate."""
        return self._authority.issue(f"client-{secrets.token_hex(4)}", user=user, groups=groups)

    def write_kubeconfig(
        self, path: Path, *, url: str = "", token: str | None = None, certificate: Certificate | None = None
    ) -> Path:
        """Write a kubeconfig file of one context. `url` defaults to the API server; a proxy's URL goes through it."""
        user: dict[str, str] = {"token": token or self.token}
        if certificate is not None:
            user = {"client-certificate": str(certificate.certificate), "client-key": str(certificate.key)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [
                {"name": "test", "cluster": {"server": url or self.url, "certificate-authority": str(self.ca)}}
            ],
            "users": [{"name": "test", "user": user}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def _etcd_command(self) -> list[str]:
        """Return the command of an etcd that keeps its data when it is killed, but not when the machine is."""
        client, peer = self.etcd_url, f"http://127.0.0.1:{self._ports['etcd-peer']}"
        return [
            str(self._programs / "etcd"),
            f"--data-dir={self.directory / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def _apiserver_command(self) -> list[str]:
        """Return the command of an API server with tokens, client certificates and RBAC, without service accounts."""
        key = self.directory / _ACCOUNT_KEY
        return [
            str(self._programs / "kube-apiserver"),
            f"--etcd-servers={self.etcd_url}",
            f"--secure-port={self._ports['apiserver']}",
            "--insecure-port=0",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={self._serving.certificate}",
            f"--tls-private-key-file={self._serving.key}",
            f"--cert-dir={key.parent}",
            f"--client-ca-file={self.ca}",
            f"--token-auth-file={self.directory / _TOKENS}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
            *self._apiserver_flags,
        ]

    def _controller_manager_command(self) -> list[str]:
        """Return the command of the controllers that jobs rely on, with short intervals."""
        return [
            str(self._programs / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            f"--controllers={_CONTROLLERS}",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--port=0",
            "--secure-port=0",
            *self._controller_manager_flags,
        ]

    def _scheduler_command(self) -> list[str]:
        self._ports["scheduler"] = free_ports(1)[0]  # the default is one port per machine
        address = f"127.0.0.1:{self._ports['scheduler']}"
        settings = {
            "apiVersion": "kubescheduler.config.k8s.io/v1beta1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "healthzBindAddress": address,
            "metricsBindAddress": address,
            "clientConnection": {"kubeconfig": str(self.kubeconfig), "qps": 500, "burst": 1000},
        }
        path = self.directory / "scheduler.yaml"
        path.write_text(yaml.safe_dump({**settings, **self._scheduler_configuration}))
        return [str(self._programs / "kube-scheduler"), f"--config={path}", "--secure-port=0"]

    def _scheduler_ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._ports['scheduler']}/healthz", timeout=5) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def _wait_until_ready(self) -> bool:
        """Return False when another program has taken one of the ports."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self._apiserver_ready():
            for server in (self.etcd, self.apiserver):
                if not server.is_running:
                    assert server.port_was_taken(), f"{server.name} ended:\n{server.log()[-2000:]}"
                    return False
            assert time.monotonic() < deadline, f"the API server does not serve:\n{self.apiserver.log()[-2000:]}"
            time.sleep(0.05)
        return True

    def _apiserver_ready(self) -> bool:
        """Return whether it serves and has created the namespace `default`, which it does only once it is ready."""
        with contextlib.suppress(OSError):
            return bool(self.request("GET", "/readyz") == "ok") and self.exists("/api/v1/namespaces/default")
        return False

    def _etcd_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._etcd_request("/v3/kv/range", {"key": "AA=="}))
        return False

    def _etcd_request(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(f"{self.etcd_url}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def _may(self, user: str, rule: Mapping[str, Any], namespace: str) -> bool:
        group, resource, verb = (rule[key][0] for key in ("apiGroups", "resources", "verbs"))
        asked = {"namespace": namespace, "group": group, "resource": resource, "verb": verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": asked},
        }
        answer = self.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def _is_served(self, definition: Mapping[str, Any]) -> bool:
        spec = definition["spec"]
        version = next(version["name"] for version in spec["versions"] if version["served"])
        return self.exists(f"/apis/{spec['group']}/{version}/{spec['names']['plural']}")


_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"

StartControlPlane = Callable[..., ControlPlane]


def until(condition: Callable[[], object], what: str, *, within: float = 60.0) -> None:
    """Wait for a condition without an event loop; fails after this number of seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not {what} within {within} s"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The control plane that all tests of this run share: each works in its own `namespace`. Never stop this one. Its
    etcd keeps the history of its objects."""
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), apiserver_flags=etcd_history.FLAGS) as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A new namespace of the shared control plane. Its content is deleted later, without waiting."""
    name = f"test-{secrets.token_hex(5)}"
    control_plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    control_plane.request("DELETE", f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=0")
    control_plane.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
async def kube(control_plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """The administrator's client of the shared control plane."""
    from store.kube.client.client import KubeClient

    async with await KubeClient.connect(str(control_plane.kubeconfig)) as client:
        yield client


@pytest.fixture
def start_control_plane(tmp_path: Path) -> Iterator[StartControlPlane]:
    """Start a control plane of this test's own: `start_control_plane(apiserver_flags=[…])`."""
    planes: list[ControlPlane] = []

    def start(**options: Any) -> ControlPlane:
        plane = ControlPlane(tmp_path / f"control-plane-{len(planes)}", **options)
        planes.append(plane)
        plane.start()
        return plane

    yield start
    for plane in planes:
        plane.close()
        shutil.rmtree(plane.directory, ignore_errors=True)


@pytest.fixture
def own_control_plane(start_control_plane: StartControlPlane) -> ControlPlane:
    """A control plane that the test may stop, kill and pause, each part on its own."""
    return start_control_plane()
