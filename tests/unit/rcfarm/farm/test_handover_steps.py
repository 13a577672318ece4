"""Single steps of a hand-over between two RCs; `tests.property.test_handovers` plays whole ones."""

from __future__ import annotations

from rcfarm.farm.handover import HandoverInput, step
from store.schema.records import Handover


def record(desired: int, minimum: int) -> Handover:
    return Handover(old="blue", new="green", desired=desired, minimum=minimum, state="running")


def test_pods_of_unknown_health_pass_as_soon_as_the_others_are_enough() -> None:
    """They may work, so not before; and not later, as no further pod might ever count."""
    for counting, nodes in ((1, ()), (2, ("n9",))):
        new = {f"n{number}": number < counting for number in range(2)}
        found = step(HandoverInput(record(3, 2), {"n9": None}, new, {"n9"}, replicas=2))
        assert found.nodes == nodes, counting


def test_it_never_asks_for_more_replicas_than_desired() -> None:
    """Though the new RC still has pods that are surplus; what an operator has asked for beyond that stays."""
    new = dict.fromkeys(("n1", "n2", "n3", "n4", "n5"), False)
    assert step(HandoverInput(record(3, 1), {"n9": True}, new, {"n9"}, replicas=3)).replicas == 3
    assert step(HandoverInput(record(3, 1), {"n9": True}, new, {"n9"}, replicas=4)).replicas == 4
