"""The operator's choices for all jobs of `kubeflow.org/v1`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from controllers.jobs.api import CleanPodPolicy
from store.decoding import Undecodable, load_yaml
from store.errors import RcfarmError
from store.kube.api.objects import Object

_PLACEHOLDER = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}")
_FIELDS = (".MasterAddr", ".InitContainerImage", ".MaxTries")

_DEFAULT_TEMPLATE = """\
- name: init-pytorch
  image: {{.InitContainerImage}}
  imagePullPolicy: IfNotPresent
  command:
    - sh
    - -c
    - |
      for try in $(seq {{.MaxTries}}); do
        nslookup {{.MasterAddr}} && exit 0
        echo "try $try of {{.MaxTries}}: {{.MasterAddr}} has no address yet"
        sleep 2
      done
      exit 1
  resources:
    limits: {cpu: 100m, memory: 20Mi}
    requests: {cpu: 50m, memory: 10Mi}
"""


class BadTemplate(RcfarmError, ValueError):
    """A file with init containers that can't be used; the message names it."""


@dataclass(frozen=True, slots=True)
class InitContainers:
    """What a PyTorch worker runs first, until its master's name has an address.

    `max_tries`: lookups, two seconds apart. `template`: a YAML list of containers with the training-operator's
    placeholders, `{{.MasterAddr}}`, `{{.InitContainerImage}}` and `{{.MaxTries}}`. `source`: its name in errors. Raises
    `BadTemplate`.
    """

    image: str = "alpine:3.10"
    max_tries: int = 100
    template: str = _DEFAULT_TEMPLATE
    source: str = "the template of init containers"

    def __post_init__(self) -> None:
        self.render("master")  # at the start, not when the first job comes

    @classmethod
    def load(cls, image: str, max_tries: int, path: Path) -> InitContainers:
        """Return them with the template in a file; without such a file, with ours. Raises `BadTemplate`."""
        try:
            return cls(image, max_tries, path.read_text(), str(path))
        except FileNotFoundError:
            return cls(image, max_tries)
        except (OSError, UnicodeError) as error:
            raise BadTemplate(f"{path}: {error}") from error

    def render(self, master: str) -> list[Object]:
        """Return the containers of one worker. `master`: the name of its master's service. Raises `BadTemplate`."""
        values = dict(zip(_FIELDS, (master, self.image, str(self.max_tries)), strict=True))
        for name in _PLACEHOLDER.findall(self.template):
            if name not in values:
                known = ", ".join(f"{{{{{field}}}}}" for field in _FIELDS)
                raise BadTemplate(f"{self.source}: {{{{{name}}}}} is not one of {known}")
        try:
            containers = load_yaml(_PLACEHOLDER.sub(lambda found: values[found[1]], self.template))
        except Undecodable as error:
            raise BadTemplate(f"{self.source}: {error}") from error
        if not isinstance(containers, list) or not all(
            isinstance(entry, dict) and entry.get("name") and entry.get("image") for entry in containers
        ):
            raise BadTemplate(f"{self.source}: expected a YAML list of containers, each with a name and an image")
        return containers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """`init_containers`: of PyTorch workers that have a master; None: none. `legacy_labels`: whether pods also carry
    the five labels without a prefix, which the training-operator dropped in 1.6. `disable_istio`: whether pods refuse
    Istio's sidecar if their template says nothing about it. `default_clean_pod_policy`: of jobs without one.
    `cluster_domain`: such as `cluster.local`, appended to the addresses in `TF_CONFIG`; "" for none. `worker_master`:
    whether PyTorch workers without a master and an elastic policy get worker 0 as their master. `autoscalers`: whether
    elastic PyTorchJobs with metrics get a HorizontalPodAutoscaler.
    """

    init_containers: InitContainers | None = field(default_factory=InitContainers)
    legacy_labels: bool = False
    disable_istio: bool = False
    default_clean_pod_policy: CleanPodPolicy = "None"
    cluster_domain: str = ""
    worker_master: bool = False
    autoscalers: bool = True
