"""Give every decoder of foreign input many hostile texts: `python -m tests.fuzz_records --count 1000000`.

A decoder may only return its value or raise its own error, and may not take long. The texts are random bytes, damaged
good texts, and good texts with a hostile value in them (see `tests.support.hostile`). A line of JSON per decoder
reports the result; the exit code is 1 when anything else was raised, and the text that caused it is printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Iterable, Iterator

import structlog

from tests.support.decoders import DECODERS, Decoder
from tests.support.hostile import FRAGMENTS, mutations, slow_yaml

SHOWN = 400  # bytes of a text that broke a decoder


def fuzz(name: str, decoder: Decoder, texts: Iterable[bytes]) -> tuple[dict[str, object], bytes | None]:
    """Return the figures, and the first text that made the decoder raise something else, which ends the run."""
    read = refused = 0
    slowest = 0.0
    for text in texts:
        began = time.thread_time()
        try:
            decoder.read(text)
            read += 1
        except decoder.errors:
            refused += 1
        except Exception as error:
            return {"decoder": name, "tried": read + refused + 1, "raised": repr(error)[:SHOWN]}, text
        slowest = max(slowest, time.thread_time() - began)
    tried = read + refused
    return {
        "decoder": name,
        "tried": tried,
        "read": read,
        "refused": refused,
        "slowest_ms": round(slowest * 1e3, 1),
    }, None


def texts_for(decoder: Decoder, seed: int, count: int) -> Iterator[bytes]:
    """Yield the known bad texts first, then `count` others that follow from the seed."""
    yield from (*decoder.seeds, *FRAGMENTS, *slow_yaml())
    yield from mutations(random.Random(seed), decoder.seeds, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="texts per decoder")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="repeats a run")
    parser.add_argument("--only", action="append", choices=sorted(DECODERS), help="these decoders; else all")
    chosen = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(json.dumps({"seed": chosen.seed, "count": chosen.count}), flush=True)
    failed = False
    for name in chosen.only or DECODERS:
        began = time.monotonic()
        figures, culprit = fuzz(name, DECODERS[name], texts_for(DECODERS[name], chosen.seed, chosen.count))
        print(json.dumps({**figures, "seconds": round(time.monotonic() - began, 1)}), flush=True)
        if culprit is not None:
            failed = True
            print(f"  {len(culprit)} bytes: {culprit[:SHOWN]!r}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
