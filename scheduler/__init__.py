"""Schedulers: the protocol that decides where pods run, and its implementations."""

from scheduler.label import LabelScheduler
from scheduler.protocol import Absence, Eligibility, NodeDirectory, NodeState, Scheduler, SchedulerError

__all__ = ["Absence", "Eligibility", "LabelScheduler", "NodeDirectory", "NodeState", "Scheduler", "SchedulerError"]
