"""All events of a random life, with their weights."""

from __future__ import annotations

from collections.abc import Callable

from tests.property.hived.world import forgeries, trials
from tests.property.hived.world.choices import Choices
from tests.property.hived.world.world import World

Event = Callable[[World, Choices], None]

EVENTS: dict[Event, int] = {
    World.submit: 24,
    World.ask_for_gang: 12,
    World.ask: 8,
    World.delete_pod: 6,
    World.delete_job: 4,
    World.evict: 8,
    World.change_node: 7,
    World.heal_all: 4,
    World.restart: 1,
    World.reconfigure: 1,
    trials.allocate_and_delete: 4,
    trials.break_and_heal: 4,
    trials.ask_for_quota: 4,
    trials.save_and_restore: 1,
    forgeries.ask_with_mistake: 1,
    forgeries.disagree: 1,
    forgeries.forge: 1,
}
_WEIGHTED = [event for event, weight in EVENTS.items() for _ in range(weight)]


def step(world: World, choices: Choices) -> None:
    """Apply one event."""
    _WEIGHTED[choices.below(len(_WEIGHTED))](world, choices)
