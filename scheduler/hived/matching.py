"""Bipartite matching: a place for everyone, or the certainty that there is none. Source: Kuhn's augmenting paths."""

from __future__ import annotations

from collections.abc import Sequence


def match(left: int, candidates: Sequence[Sequence[int]]) -> list[int] | None:
    """For each of `left` nodes one of its candidates, no candidate twice; None if that is not possible.

    `candidates[i]` are in order of preference: each node in turn takes its first that is free, and only if none is,
    earlier ones move. The same question has the same answer always.
    """
    chosen = [-1] * left
    holders: dict[int, int] = {}
    if all(_place(node, candidates, chosen, holders) for node in range(left)):
        return chosen
    return None


def _place(node: int, candidates: Sequence[Sequence[int]], chosen: list[int], holders: dict[int, int]) -> bool:
    """Search breadth first, so that as few others as possible move: who could take what from whom."""
    takers: dict[int, int] = {}
    queue = [node]
    for taker in queue:
        for candidate in candidates[taker]:
            if candidate in takers:
                continue
            takers[candidate] = taker
            if candidate not in holders:
                _hand_over(candidate, node, takers, chosen, holders)
                return True
            queue.append(holders[candidate])
    return False


def _hand_over(candidate: int, node: int, takers: dict[int, int], chosen: list[int], holders: dict[int, int]) -> None:
    """Everyone on the path to the free candidate takes what was found for it, back to `node`, which had none."""
    while True:
        taker = takers[candidate]
        given_up = chosen[taker]
        chosen[taker], holders[candidate] = candidate, taker
        if taker == node:
            return
        candidate = given_up
