"""The switch: passes packets between the machines' TUN devices, as the rules say.

`python -m tests.chaos.switch NAMESPACE=ADDRESS …`. Each line of standard input is a JSON list of all rules; it is
answered with a line once they hold. The switch ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import socket
import struct
import sys
from typing import Any

from tests.chaos.network import DEVICE, enter

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_BATCH = 64  # packets read from one device in a row


class Switch:
    """`devices`: the open TUN device of each address, as the four bytes of a packet's header."""

    def __init__(self, devices: dict[bytes, int]) -> None:
        self._devices = devices
        self._rules: dict[tuple[bytes, bytes], list[dict[str, Any]]] = {}
        self._rng = random.Random()

    def use(self, rules: list[dict[str, Any]]) -> None:
        """Replace all rules."""
        found: dict[tuple[bytes, bytes], list[dict[str, Any]]] = {}
        for rule in rules:
            found.setdefault((socket.inet_aton(rule["source"]), socket.inet_aton(rule["target"])), []).append(rule)
        self._rules = found

    def read(self, device: int) -> None:
        """Pass on the packets that a machine sends."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                self._pass(os.read(device, 65536))

    def _pass(self, packet: bytes) -> None:
        if packet[0] >> 4 != 4:
            return
        delay = 0.0
        for rule in self._rules.get((packet[12:16], packet[16:20]), ()):
            if rule["loss"] and self._rng.random() < rule["loss"]:
                return
            delay += rule["delay"] + self._rng.uniform(0.0, rule["jitter"])
        if delay:
            asyncio.get_running_loop().call_later(delay, self._deliver, packet)
        else:
            self._deliver(packet)

    def _deliver(self, packet: bytes) -> None:
        device = self._devices.get(packet[16:20])
        if device is not None:
            with contextlib.suppress(OSError):  # its queue is full: a switch drops
                os.write(device, packet)


def open_device(namespace: str) -> int:
    """Attach to the TUN device of a namespace."""
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


async def main(machines: list[str]) -> None:
    """Pass packets until standard input ends."""
    pairs = [machine.partition("=") for machine in machines]
    devices = {socket.inet_aton(address): open_device(namespace) for namespace, _, address in pairs}
    switch, loop = Switch(devices), asyncio.get_running_loop()
    for device in devices.values():
        loop.add_reader(device, switch.read, device)
    commands = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        switch.use(json.loads(line))
        print("ok", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
