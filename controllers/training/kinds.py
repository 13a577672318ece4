"""The kinds of training jobs that rcfarm runs."""

from __future__ import annotations

from controllers.training.kind import TrainingJobs
from controllers.training.pytorch import PyTorchJobs
from controllers.training.tensorflow import TFJobs

KINDS: tuple[type[TrainingJobs], ...] = (PyTorchJobs, TFJobs)
