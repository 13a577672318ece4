"""Paths, inputs and a template that count how often they are used."""

from __future__ import annotations

from typing import Any

from controllers.tasks.api.data import OutputReader
from controllers.tasks.template import Parameters


class Paths:
    """An `InputReader` and `OutputWriter`."""

    def __init__(self, inputs: dict[str, Any], prefix: str = "s3://in", error: Exception | None = None) -> None:
        self.inputs, self.prefix, self.error, self.reads = inputs, prefix, error, 0

    async def get(self) -> dict[str, Any]:
        self.reads += 1
        if self.error:
            raise self.error
        return self.inputs

    async def put(self, reader: OutputReader) -> None:
        raise AssertionError("rendering writes no outputs")

    def get_input_prefix_path(self) -> str:
        return self.prefix

    def get_input_path(self) -> str:
        return f"{self.prefix}/inputs.json"

    def get_raw_output_prefix(self) -> str:
        return "s3://raw"

    def get_previous_checkpoints_prefix(self) -> str:
        return ""

    def get_checkpoint_prefix(self) -> str:
        return "s3://checkpoints"

    def get_output_prefix_path(self) -> str:
        return "s3://out"

    def get_output_path(self) -> str:
        return "s3://out/outputs.json"

    def get_deck_path(self) -> str:
        return "s3://out/deck.html"

    def get_error_path(self) -> str:
        return "s3://out/error.json"


class Task:
    """A `TaskTemplatePath`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.uploads = error, 0

    async def path(self) -> str:
        self.uploads += 1
        if self.error:
            raise self.error
        return "s3://template"


def parameters(
    inputs: dict[str, Any], *, name: str = "name", prefix: str = "s3://in", error: Exception | None = None
) -> Parameters:
    """Return parameters over `inputs`; reading and uploading raise `error`."""
    paths = Paths(inputs, prefix, error)
    return Parameters(paths, paths, name, Task(error), "team")
