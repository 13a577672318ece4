"""The barrier of a training job: an init container that holds each pod until all replicas have addresses. Pure.

A job asks for it by an annotation. Two half-started jobs may hold the devices that the other one waits for. With a
barrier both give up after a while, and release what they hold. The exit code asks for a retry under the policy
`ExitCode`; the time differs from job to job, so that two jobs that block each other separate.

The container looks names up, as the training-operator's init container does, so it needs no rights: the services
publish the addresses of pods that are not ready. The barrier of Frameworks (`controllers.framework.barrier`) reads the
Framework instead.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from controllers.jobs.api import BadSpec, ReplicaSpec, gen_general_name
from controllers.jobs.status import JobStatus, ReplicaStatus
from store.kube.api.objects import Object, annotations_of, name_of, uid_of

ANNOTATION = "rcfarm.dev/barrier"
"""An annotation of jobs: the seconds after which the barrier gives up, at the earliest."""

CONTAINER = "barrier"
GIVEN_UP = 201  # as the barrier of Frameworks: a conflict that passes
_SECONDS = re.compile(r"[1-9][0-9]{0,5}")

_SCRIPT = f"""\
end=$(( $(date +%s) + LIMIT ))
for name in "$@"; do
  nslookup "$name" >/dev/null 2>&1 && continue
  echo "waiting for the address of $name"
  until nslookup "$name" >/dev/null 2>&1; do
    if [ "$(date +%s)" -ge "$end" ]; then
      echo "$name has no address after LIMIT s: giving up with {GIVEN_UP}"
      exit {GIVEN_UP}
    fi
    sleep 2
  done
done
echo "all $# replicas have addresses"
"""


def seconds_of(job: Object) -> int | None:
    """Return the seconds of the job's barrier; None if it asks for none. Raises `BadSpec`."""
    text = annotations_of(job).get(ANNOTATION)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text):
        raise BadSpec(f"metadata.annotations[{ANNOTATION}]: {text!r} is not a number of seconds, such as '600'")
    return int(text)


def check_barrier(job: Object, replicas: Mapping[str, ReplicaSpec]) -> list[str]:
    """Return a warning if the kubelet would start the barrier again in place. Raises `BadSpec`."""
    if seconds_of(job) is None:
        return []
    kept = [name for name, spec in replicas.items() if spec.restart_policy in ("OnFailure", "Always")]
    return [
        f"{name}.restartPolicy: under {replicas[name].restart_policy} a pod whose barrier gives up keeps its devices, "
        "and waits again; use ExitCode"
        for name in kept
    ]


def barrier_container(job: Object, replicas: Mapping[str, ReplicaSpec], status: JobStatus, image: str) -> Object:
    """Return the init container of all pods of a job that asks for one. `replicas`: with defaults, by type.

    Replicas that have completed have no address any more; nothing waits for them.
    """
    seconds = seconds_of(job) or 0
    limit = seconds + zlib.crc32(uid_of(job).encode()) % (seconds // 2 + 1)
    awaited: list[str] = []
    for replica_type, spec in replicas.items():
        completed = frozenset(status.replica_statuses.get(replica_type, ReplicaStatus()).completed)
        indexes = (index for index in range(spec.replicas) if index not in completed)
        awaited += (gen_general_name(name_of(job), replica_type, index) for index in indexes)
    return {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", _SCRIPT.replace("LIMIT", str(limit)), CONTAINER],
        "args": awaited,
        "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
    }
