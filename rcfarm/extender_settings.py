"""Settings of `rcfarm extender` beside HiveD's own file, which says what the cells are and where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rcfarm.agent.settings import BadSettings
from rcfarm.jobs_settings import OFF, check_lease
from store.tls import TlsFiles

DEFAULT_FILE = "./hivedscheduler.yaml"


class ExtenderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HiveD scheduler extender: what HiveD's own file does not say. Durations in seconds.

    `rcfarm extender --config` names HiveD's file; the file with these settings is given as `--settings FILE`.
    """

    config: str = ""
    """HiveD's configuration file. Default "": what `CONFIG` says, else `./hivedscheduler.yaml`, as for HiveD."""

    reload_interval: float = 2.0
    """Seconds between two looks at that file; a change counts when two looks have found the same. Default: 2."""

    evict_victims: Literal["auto", "always", "never"] = "auto"
    """Whether victims of a preemption are evicted by us. `auto`: for kube-schedulers that turn out not to ask whom to
    preempt, as several releases don't. Default: `auto`."""

    node_cache_capable: bool = True
    """What `nodeCacheCapable` says of this extender in kube-scheduler's configuration. False: it sends whole nodes, and
    bodies of up to 64 MiB are taken, two at once, instead of 1 MiB, eight at once. Default: true, as in our examples.
    """

    tls_cert_file: str = ""
    """The certificate, with its chain, of the listener for kube-scheduler and inspection; PEM. It is read again when it
    changes. Default "": plain HTTP, as HiveD."""

    tls_key_file: str = ""
    """The key of that certificate; PEM. Default ""."""

    client_ca_file: str = ""
    """The authority whose client certificates that listener requires, of every client; PEM. kube-scheduler's extender
    `tlsConfig` has `certFile`, `keyFile` and `caFile`. Default "": none is required."""

    lease: str = OFF
    """`NAME` or `NAMESPACE/NAME` of the Lease under which one of several replicas answers; only that one is ready.
    Default: `off`, no election: then never run two, for each would give away what the other has given away."""

    lease_duration: float = 15.0
    """Seconds after which another may take over from a leader that is silent. Default: 15, as in Kubernetes itself."""

    renew_deadline: float = 10.0
    """Seconds since its last good renewal after which a leader stops its work. Default: 10."""

    retry_period: float = 2.0
    """Seconds between two renewals, and about as many between two looks of a standby. Default: 2."""

    def file(self, environ: Mapping[str, str]) -> Path:
        """Where HiveD's file is."""
        return Path(self.config or environ.get("CONFIG") or DEFAULT_FILE).expanduser()

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files, or None for plain HTTP."""
        if not self.tls_cert_file:
            return None
        ca = Path(self.client_ca_file) if self.client_ca_file else None
        return TlsFiles(Path(self.tls_cert_file), Path(self.tls_key_file), ca)

    def checked(self) -> ExtenderSettings:
        """These settings, if they make sense. Raises `BadSettings`."""
        if not 0.1 <= self.reload_interval <= 3600:
            raise BadSettings(f"extender.reload_interval: {self.reload_interval:g} s must be within 0.1 to 3600 s")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise BadSettings("extender.tls_cert_file and extender.tls_key_file: set both, or none for plain HTTP")
        if self.client_ca_file and not self.tls_cert_file:
            raise BadSettings("extender.client_ca_file: needs extender.tls_cert_file and extender.tls_key_file as well")
        check_lease("extender", self.lease, self.lease_duration, self.renew_deadline, self.retry_period)
        return self
