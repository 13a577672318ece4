"""What is asked at the moment a request leaves, by whoever must not let a late one through.

A write may wait: for the client's own rate, for a pause that the server asked for, for a free connection. The fence
asks before all that, and puts its question here for the transport, which asks it again when there is nothing left to
wait for. It is a context variable because any number of other `KubeApi`s may stand between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Question = Callable[[], None]  # raises when nothing may be sent


def _anything_goes() -> None:
    return


_question: ContextVar[Question] = ContextVar("before sending", default=_anything_goes)


@contextmanager
def asking(question: Question) -> Iterator[None]:
    """Ask now, and before each request that is sent within the block."""
    question()
    token = _question.set(question)
    try:
        yield
    finally:
        _question.reset(token)


def ask() -> None:
    """To be called right before a request is sent; raises when it must not be."""
    _question.get()()
