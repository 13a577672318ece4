"""`rcfarm extender` as a process that tests kill and start again: always at the same address, with the same file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from store.kube.api.objects import Object
from tests.support.consul.server import free_ports
from tests.support.jobs.replicas import until
from tests.support.programs.daemon import DaemonLives


class ExtenderProcess(DaemonLives):
    """`config`: as in HiveD's file, without the settings of this process. `settings`: as for --set.

    `url`: of the server that kube-scheduler calls.
    """

    def __init__(self, directory: Path, kubeconfig: Path, config: Object, settings: Mapping[str, object]) -> None:
        self.file = directory / "hived.yaml"
        chosen = {"extender.reload_interval": 0.2, **settings}
        flags = [f"--set={name}={value}" for name, value in chosen.items()]
        super().__init__(directory, "extender", "--config", str(self.file), *flags)
        self._port = free_ports(1)[0]
        self._own = {"webServerAddress": f"127.0.0.1:{self._port}", "kubeConfigFilePath": str(kubeconfig)}
        directory.mkdir(parents=True, exist_ok=True)
        self.write(config)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def write(self, config: Object) -> None:
        """Replace the whole file by another one."""
        self.write_text(yaml.safe_dump({**config, **self._own}, sort_keys=False))

    def write_text(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.file)

    def readiness(self) -> str:
        """Return the text of /readyz; "" when it is not ready."""
        status, text = self.process.get("/readyz")
        return text if status == 200 else ""

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            assert self.is_running, self.process.log()
            return bool(await asyncio.to_thread(self.readiness))

        await until(is_ready, "a ready extender")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last process, by name with labels as they are written."""
        lines = [line for line in self.process.get("/metrics")[1].splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
