"""A witness of extenders: reads etcd's history afterwards and checks its invariants.

At every moment of the history of a namespace, among its live pods with a node
- a device (node, index) is held by one pod at most, and is in the place of one group at most,
- the annotations of a pod are those that a reader of HiveD's expects, and never change,
- pods of one group have the same places of the group in their annotations.

The reader here knows YAML and the field names, and nothing of our code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from store.kube.api.objects import Object, annotations_of, is_deleting, name_of, uid_of
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.etcd_history import changes, current_revision

_GROUP = "hivedscheduler.microsoft.com"
_SPEC, _INFO, _ISOLATION = (
    f"{_GROUP}/pod-scheduling-spec",
    f"{_GROUP}/pod-bind-info",
    f"{_GROUP}/pod-leaf-cell-isolation",
)
_FINISHED = ("Succeeded", "Failed")

Place = tuple[str, tuple[int, ...]]  # a node, and devices on it in the order of the placement


class Holding(NamedTuple):
    """The contents of a bound pod's annotations. `places`: of its whole group, sorted."""

    group: str
    own: Place
    places: tuple[Place, ...]


@dataclass
class Seen:
    """A summary of the history. `bound`: what each pod (UID) held; `ended`: pods whose deletion was requested while
    they held something; `finished`: pods that completed undisturbed. `groups`: number of bound pods by group;
    `most_held`: devices.
    """

    bound: dict[str, Holding] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    groups: Counter[str] = field(default_factory=Counter)
    most_held: int = 0


class Witness:
    """Witness of one namespace, from its creation until `check` is called."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._etcd, self._prefix = plane.etcd_url, f"pods/{namespace}/"
        self._since = current_revision(plane.etcd_url)

    def check(self) -> Seen:
        """Fail at the first violation. Return the summary."""
        view = History()
        for change in changes(self._etcd, self._since):
            if change.path.startswith(self._prefix):
                view.see(change.path.removeprefix(self._prefix), change.obj)
        return view.seen


class History:
    """The namespace at one revision, and the summary so far; fails at a violation."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._alive: dict[str, Object] = {}  # by name: pods that hold something

    def see(self, name: str, pod: Object | None) -> None:
        """Record that a pod was written, or deleted (None)."""
        before = self._alive.get(name)
        if before is not None and (pod is None or uid_of(pod) != uid_of(before)):
            self.seen.ended.add(uid_of(self._alive.pop(name)))
        if pod is None or not pod["spec"].get("nodeName"):
            return
        if (pod.get("status") or {}).get("phase") in _FINISHED:
            if self._alive.pop(name, None) is not None and uid_of(pod) not in self.seen.ended:
                self.seen.finished.add(uid_of(pod))
            return
        self._see_bound(name, pod)

    def _see_bound(self, name: str, pod: Object) -> None:
        holding = read(pod)
        uid = uid_of(pod)
        if uid not in self.seen.bound:
            self.seen.bound[uid] = holding
            self.seen.groups[holding.group] += 1
            assert not is_deleting(pod), f"{name} was bound while it was deleted"
        assert self.seen.bound[uid] == holding, f"{name} held {self.seen.bound[uid]}, then {holding}"
        if is_deleting(pod):
            self.seen.ended.add(uid)
        self._alive[name] = pod
        self._hold()

    def _hold(self) -> None:
        """Check that nothing is held twice."""
        holders: dict[tuple[str, int], str] = {}
        owners: dict[tuple[str, int], Holding] = {}
        for name, pod in self._alive.items():
            holding = self.seen.bound[uid_of(pod)]
            for device in _devices(holding.own):
                other = holders.setdefault(device, name)
                assert other == name, f"{device} is held by {other} and by {name}"
            for place in holding.places:
                for device in _devices(place):
                    owner = owners.setdefault(device, holding)
                    assert owner.group == holding.group, f"{device} is of {owner.group} and of {holding.group}"
                    assert owner.places == holding.places, f"pods of {owner.group} differ: {owner} and {holding}"
        self.seen.most_held = max(self.seen.most_held, len(holders))


def _devices(place: Place) -> list[tuple[str, int]]:
    return [(place[0], index) for index in place[1]]


def read(pod: Object) -> Holding:
    """Return the contents of a bound pod's annotations. Fails where a reader of HiveD's would."""
    annotations = annotations_of(pod)
    spec, info = yaml.safe_load(annotations[_SPEC]), yaml.safe_load(annotations[_INFO])
    assert info.keys() == {"node", "leafCellIsolation", "cellChain", "affinityGroupBindInfo"}, info
    assert info["node"] == pod["spec"]["nodeName"], (name_of(pod), info)
    assert isinstance(info["cellChain"], str)
    assert info["cellChain"]
    isolation = tuple(int(index) for index in annotations[_ISOLATION].split(","))
    assert annotations[_ISOLATION] == ",".join(map(str, isolation))
    assert tuple(info["leafCellIsolation"]) == isolation, (name_of(pod), info, isolation)
    assert len(set(isolation)) == len(isolation) == spec["leafCellNumber"], (name_of(pod), isolation, spec)
    places = [_place(each, spec) for member in info["affinityGroupBindInfo"] for each in _places(member)]
    own = (info["node"], isolation)
    assert own in places, (name_of(pod), own, places)
    group = spec.get("affinityGroup") or {"name": uid_of(pod), "members": [_alone(spec)]}
    asked = Counter({each["leafCellNumber"]: each["podNumber"] for each in group["members"]})
    assert Counter(len(indices) for _, indices in places) == asked, (name_of(pod), places, asked)
    return Holding(group["name"], own, tuple(sorted(places)))


def _alone(spec: Any) -> Any:
    return {"podNumber": 1, "leafCellNumber": spec["leafCellNumber"]}


def _places(member: Any) -> list[Any]:
    """Return the pods of one size."""
    assert member.keys() == {"podPlacements"}, member
    placements: list[Any] = member["podPlacements"]
    assert len({len(each["physicalLeafCellIndices"]) for each in placements}) == 1, member
    return placements


def _place(placement: Any, spec: Any) -> Place:
    assert placement.keys() == {"physicalNode", "physicalLeafCellIndices", "preassignedCellTypes"}, placement
    indices, types = placement["physicalLeafCellIndices"], placement["preassignedCellTypes"]
    assert all(type(index) is int for index in indices), placement
    assert len(types) == len(indices), placement
    assert all(isinstance(each, str) for each in types), placement
    assert any(types) == all(types), placement
    if spec.get("priority", 0) < 0:
        assert not any(types), placement
    return placement["physicalNode"], tuple(indices)
