"""The root of every error that a person, a store, a network or a record can cause; anything else is a defect of rcfarm.

A daemon logs one of these without a traceback, and a command shows it as one line. The branches, each drawn further in
its own module:

    RcfarmError
    ├── StoreError                 store/kv/protocol.py: unavailable, denied, refused transactions
    ├── KubeError                  store/kube/api/errors.py: by status code and reason
    ├── BadRecord, BadKey, BadManifest, BadVariables, BadLabel, BadSelector, Undecodable, BadPatch, BadFieldSelector
    │                              what is stored or given can't be read: store/schema/, store/decoding.py, store/kube/
    ├── ChangeRefused, UnknownObject   store/schema/: mutation lock, labels
    ├── SchedulerError             scheduler/protocol.py
    ├── HivedError                 scheduler/hived/errors.py: what the extender answers with
    ├── InvalidAnnotation          scheduler/hived/contract.py
    ├── JobError, BadSpec, BadStatus   controllers/jobs/: api.py, status.py
    ├── TaskError                  controllers/tasks/api/errors.py: by what a plugin can do about it
    ├── BadFramework, BadConfig, BadView   controllers/framework/
    ├── BadTemplate                controllers/training/options.py
    ├── DataError                  controllers/tasks/io/data.py: references, sizes, servers
    ├── PluginError, SinkError     controllers/tasks/engine/: a plugin's call, a sink of events
    ├── BadSchedule                controllers/tasks/schedule.py
    ├── RCError, NodeError, PodError, TaskRequestError   rcfarm/operations/: an operator's verb that was refused
    ├── CannotReconcile, CannotReplay, CannotSend, ManifestUnusable, NameTaken   rcfarm/farm/
    ├── AgentError                 rcfarm/agent/errors.py
    ├── BadSettings, BadListener   rcfarm/config/, rcfarm/daemon/
    └── UsageProblem, Undecided, BadFlag   rcfarm/cli/
"""

from __future__ import annotations


class RcfarmError(Exception):
    """An error with a cause outside of the program. Its text names the object, what is wrong, and what to do."""


def text_of(error: BaseException) -> str:
    """Return the error's message. Code that others wrote may raise anything: a message that can't be made is named as
    such, and what is no Unicode text in it is replaced."""
    try:
        text = str(error)
    except BaseException:
        text = "(it has no readable message)"
    return text.encode(errors="replace").decode()
