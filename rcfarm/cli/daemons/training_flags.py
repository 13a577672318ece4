"""The flags of kubeflow's training-operator as those of `rcfarm jobs`, so that its Deployment keeps its arguments.

Without `--leader-elect` there is no election, as with the original, whose rights don't include Leases. Frameworks are
not run: another operator may do that. Its two listeners are kept: probes at one, metrics for everyone at the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from store.errors import RcfarmError

KINDS = ("pytorchjob", "tfjob")
_OTHER_KINDS = ("jaxjob", "mpijob", "mxjob", "paddlejob", "xgboostjob")
_ELECTION_ID = "1ca428e5.training-operator.kubeflow.org"
_SAME = {  # flags of the training-operator that are settings of ours
    "controller-threads": "jobs.workers",
    "kube-api-qps": "kube.qps",
    "kube-api-burst": "kube.burst",
    "pytorch-init-container-image": "jobs.init_container_image",
    "pytorch-init-container-template-file": "jobs.init_container_template",
    "pytorch-init-container-max-tries": "jobs.init_container_tries",
}
_NO_WEBHOOK = "rcfarm validates jobs itself; delete the original's ValidatingWebhookConfiguration"
_IGNORED = {
    "webhook-server-port": _NO_WEBHOOK,
    "webhook-service-name": _NO_WEBHOOK,
    "webhook-secret-name": _NO_WEBHOOK,
    "mpi-kubectl-delivery-image": "rcfarm runs no MPIJobs",
    "zap-devel": "see --log-format",
    "zap-encoder": "see --log-format",
    "zap-stacktrace-level": "tracebacks are always logged",
    "zap-time-encoding": "times are always UTC",
}
_ORIGINAL_SWITCHES = frozenset(["enable-gang-scheduling", "leader-elect", "zap-devel"])
_ORIGINAL_FLAGS = frozenset(
    [
        "enable-scheme", "gang-scheduler-name", "health-probe-bind-address", "kubeconfig", "leader-election-id",
        "metrics-bind-address", "namespace", "zap-log-level", *_ORIGINAL_SWITCHES, *_SAME, *_IGNORED,
    ]
)  # fmt: skip


class BadFlag(RcfarmError, ValueError):
    """A flag that can't be translated; the message names it."""


class Flags(NamedTuple):
    """`ours`: arguments of `rcfarm jobs`. `others`: given arguments that are not flags of the training-operator."""

    ours: list[str]
    others: list[str]
    warnings: list[str]


def translate(given: Sequence[str], environ: Mapping[str, str]) -> Flags:
    """Translate the arguments of the training-operator. Raises `BadFlag`."""
    values, others = _split(given)

    def last(name: str, default: str = "") -> str:
        return values.get(name, [default])[-1]

    named = {kind.strip().lower() for value in values.get("enable-scheme", ()) for kind in value.split(",")} - {""}
    if unknown := named - {*KINDS, *_OTHER_KINDS}:
        raise BadFlag(f"--enable-scheme: {min(unknown)!r} is not a kind; rcfarm runs {' and '.join(KINDS)}")
    kinds = [kind for kind in KINDS if kind in named or not named]
    if not kinds:
        raise BadFlag(f"--enable-scheme: rcfarm runs {' and '.join(KINDS)}, and none of them is named")
    not_run = sorted(named - {*KINDS})
    warnings = [f"--enable-scheme={kind} is ignored: rcfarm doesn't run this kind" for kind in not_run]
    warnings += [f"--{name} is ignored: {_IGNORED[name]}" for name in values if name in _IGNORED]
    gang = last("gang-scheduler-name") or ("volcano" if _is_true(last("enable-gang-scheduling")) else "")
    settings = {
        "jobs.gang_scheduler": "" if gang == "none" else gang,
        "web.metrics_listen": _address(last("metrics-bind-address", ":8080"), off=""),
        **{ours: last(theirs) for theirs, ours in _SAME.items()},
    }
    if settings["kube.qps"].startswith("-"):
        settings["kube.qps"] = "0"  # client-go's sign for no limit
    flags = {
        "--kinds": ",".join(kinds),
        "--lease": last("leader-election-id", _ELECTION_ID) if _is_true(last("leader-elect")) else "off",
        "--listen": _address(last("health-probe-bind-address", ":8081"), off="off"),
        "--namespace": last("namespace") or environ.get("KUBEFLOW_NAMESPACE", ""),
        "--kubeconfig": last("kubeconfig"),
        "--log-level": "debug" if last("zap-log-level") == "debug" else "",
    }
    ours = [word for flag, value in flags.items() if value for word in (flag, value)]
    ours += [word for name, value in settings.items() if value for word in ("--set", f"{name}={value}")]
    return Flags(ours, others, warnings)


def _split(given: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values of the training-operator's flags, and the other arguments. Go takes one dash or two."""
    values: dict[str, list[str]] = {}
    others: list[str] = []
    left = list(given)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or name not in _ORIGINAL_FLAGS:
            others.append(argument)
            continue
        if not equals:
            value = "true" if name in _ORIGINAL_SWITCHES else left.pop(0) if left else ""
        values.setdefault(name, []).append(value)
    return values, others


def _is_true(value: str) -> bool:
    return value.lower() in ("true", "t", "1")


def _address(bind: str, *, off: str) -> str:
    """Return the listener of an address of Go programs: `:8080` means all addresses, `0` none (`off`)."""
    if bind in ("0", ""):
        return off
    return f"0.0.0.0{bind}" if bind.startswith(":") else bind
