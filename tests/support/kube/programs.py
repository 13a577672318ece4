"""Command lines of a Kubernetes 1.20 control plane's programs for tests: everything on the loopback interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.kube.certificates import Certificate

CONTROLLERS = "garbagecollector,namespace,disruption,resourcequota"
ACCOUNT_KEY = Path("pki", "service-account.key")  # in the control plane's directory: signs tokens of service accounts
TOKENS = Path("tokens.csv")  # in the control plane's directory: tokens that never end


def etcd(programs: Path, data: Path, port: int, peer_port: int) -> list[str]:
    """Return the command line of an etcd that keeps its data when it is killed, but not when the machine is."""
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(programs / "etcd"),
        f"--data-dir={data}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def apiserver(
    programs: Path, directory: Path, *, port: int, etcd_port: int, serving: Certificate, client_ca: Path
) -> list[str]:
    """Return the command line of an API server with tokens, client certificates and RBAC, without service accounts."""
    key = directory / ACCOUNT_KEY
    return [
        str(programs / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--secure-port={port}",
        "--insecure-port=0",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={serving.certificate}",
        f"--tls-private-key-file={serving.key}",
        f"--cert-dir={key.parent}",
        f"--client-ca-file={client_ca}",
        f"--token-auth-file={directory / TOKENS}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--disable-admission-plugins=ServiceAccount",
    ]


def controller_manager(programs: Path, kubeconfig: Path) -> list[str]:
    """Return the command line of the controllers that jobs rely on, with short intervals."""
    return [
        str(programs / "kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--controllers={CONTROLLERS}",
        "--use-service-account-credentials=false",
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--port=0",
        "--secure-port=0",
    ]


def scheduler_settings(kubeconfig: Path, port: int) -> dict[str, Any]:
    """Return a `KubeSchedulerConfiguration`. Health is served on `port`: the default is one port per machine."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1beta1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "healthzBindAddress": f"127.0.0.1:{port}",
        "metricsBindAddress": f"127.0.0.1:{port}",
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 500, "burst": 1000},
    }
