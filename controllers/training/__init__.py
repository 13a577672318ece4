"""The jobs of kubeflow's training-operator, PyTorchJob and TFJob of `kubeflow.org/v1`, on the JobController library."""

from controllers.training.kind import TrainingJobs
from controllers.training.kinds import definition
from controllers.training.options import InitContainers, TrainingOptions
from controllers.training.pytorch import PyTorchJobs
from controllers.training.spec import Port, append_variables, port_of
from controllers.training.tensorflow import TFJobs

__all__ = [
    "InitContainers",
    "Port",
    "PyTorchJobs",
    "TFJobs",
    "TrainingJobs",
    "TrainingOptions",
    "append_variables",
    "definition",
    "port_of",
]
