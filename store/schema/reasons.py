"""The closed list of codes that a reason may have, by scope: what each means, what to do, and whether it blocks.

A reason is why something is not as it was asked for: a code of this list, a text for people (`detail`), since when, and
when that changes by the clock alone (`next_wake`). RCs, rollouts and tasks store theirs (`store.schema.records.Reason`,
`store.schema.tasks.Wait`). Those of nodes, Frameworks, training jobs and pods of HiveD are derived from records that
other programs write, too, and that have no field for a code. Commands, metrics, alerts and the page Reasons take the
codes from here; a test compares the list with the code that gives reasons.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Scope = Literal["rc", "rollout", "node", "task", "framework", "gpu"]


class ReasonKind(NamedTuple):
    """One code. `act`: what to do, "" where waiting is enough. `blocks`: what was asked for stands still until an
    operator acts or something outside changes; else it goes on without either, or is done."""

    meaning: str
    act: str = ""
    blocks: bool = True


DISK_FULL = ReasonKind(
    "An agent has no space on its disk, so that it can't install or start pods; what runs goes on",
    "Free space on the node that is named; `rcfarm node cordon NODE` keeps further pods away",
)
NODE_DEAD = ReasonKind(
    "The agent of the node does not answer",
    "Start the agent (`rcfarm agent`), or the machine; if it is gone, `rcfarm node cordon NODE --evict`",
)
UNREADABLE = ReasonKind("A record of it can't be read", "`rcfarm doctor` names key, field and command")

RC: dict[str, ReasonKind] = {
    # placement
    "short": ReasonKind(
        "Fewer nodes may take pods than replicas are desired",
        "Add nodes, `rcfarm node uncordon NODE`, correct the selector, or `rcfarm rc scale RC N`; "
        "`rcfarm rc explain RC` has every node",
    ),
    "allocation_failed": ReasonKind("The scheduler has no further node to give", "As for `short`"),
    "pod_id_taken": ReasonKind(
        "Another RC, or a task, has a pod of this id on a node that is wanted",
        "Delete one of the two, or give one of them another pod id",
    ),
    "ineligible_kept": ReasonKind(
        "A static RC keeps its pods on nodes that are no longer eligible",
        "Set `allocation_strategy: dynamic`, or bring the node back",
    ),
    "node_left": ReasonKind(
        "A node no longer matches the daemon set; if no other follows, its pod is removed soon", blocks=False
    ),
    "no_node_matches": ReasonKind(
        "No node may take a pod of the daemon set", "`rcfarm node label NODE KEY=VALUE`, or correct the selector"
    ),
    "transfer_waits_for_health": ReasonKind(
        "A pod is moved only once the others pass", "Repair the pods that are named"
    ),
    "transfer_in_progress": ReasonKind(
        "A pod leaves a node that is not eligible any more; the new one has to be healthy before the old one goes",
        blocks=False,
    ),
    "transfer_waits_for_lock": ReasonKind(
        "A program or a person holds the RC's mutation lock",
        "Wait, or end the program that is named; a person's lock: `rcfarm rc unlock RC`",
        blocks=False,
    ),
    "negative_replicas": ReasonKind(
        "The desired number is below zero, and taken as zero", "`rcfarm rc scale RC N`", blocks=False
    ),
    # what an operator asked for
    "disabled": ReasonKind("The RC is disabled: nothing is added, removed or repaired", "`rcfarm rc enable RC`"),
    "held": ReasonKind(
        "Nothing is removed: the brake is on, or nodes leave a daemon set",
        "`rcfarm brake status` says why, `rcfarm brake release` ends it; for a daemon set see the message",
    ),
    # the pods
    "starting": ReasonKind("An agent has not reported the pod on its manifest yet", blocks=False),
    "crashing": ReasonKind(
        "Processes end and are started again",
        "The reason has exit and count, `rcfarm rc logs RC` the output; raise the memory limit if it names one",
    ),
    "restarted": ReasonKind(
        "The pod passes, but has crashed repeatedly within minutes", "`rcfarm rc logs RC` has the output", blocks=False
    ),
    "failed": ReasonKind(
        "Processes have failed and are not restarted",
        "Correct the program, and apply its file again: `rcfarm rc apply -f FILE`",
    ),
    "unhealthy": ReasonKind("The pod does not pass its check", "The reason has the check's output"),
    "blocked": ReasonKind(
        "The agent can't bring the pod to its manifest: artifact, program, user or port", "Correct what is named"
    ),
    "disk_full": DISK_FULL,
    "node_dead": NODE_DEAD,
    # what the owner can't act on
    "bad_spec": ReasonKind("The spec can't be read", "Apply the RC again: `rcfarm rc apply -f FILE`"),
    "bad_placement": ReasonKind("The record of a placement can't be read", "Repair or remove the key that is named"),
    "bad_rollout": ReasonKind("The record of the rollout can't be read", "Remove the key that is named"),
    "bad_selector": ReasonKind("The node selector can't be read", "Apply the RC with a valid one: `rcfarm rc edit RC`"),
    "manifest_unusable": ReasonKind(
        "The manifest is missing, damaged or malformed", "Apply the RC again: `rcfarm rc apply -f FILE`"
    ),
    "pod_id_changed": ReasonKind("The manifest has another pod id than the RC's pods", "Create another RC for it"),
    "failing": ReasonKind("Several attempts in a row failed; it is retried", "The reason has the error", blocks=False),
    # what only commands see
    "unowned": ReasonKind("No farm owns the RC", "Start a farm whose selector matches its labels: `rcfarm farm`"),
    "unreadable": UNREADABLE,
    "brake": ReasonKind("The brake is on", "`rcfarm brake status`"),
    "locked": ReasonKind(
        "A program or a person holds the mutation lock; changes are refused",
        "Wait, or end the program that is named; a person's lock: `rcfarm rc unlock RC`",
        blocks=False,
    ),
    "behind": ReasonKind("The owner has not acted on the latest change yet", blocks=False),
    "progressing": ReasonKind("The owner has not processed the latest change of its pods yet", blocks=False),
}

ROLLOUT: dict[str, ReasonKind] = {
    "rollout_in_progress": ReasonKind(
        "A changed manifest is on its way; the reason says what it waits for", blocks=False
    ),
    "rollout_stuck": ReasonKind(
        "No further pod has counted within `progress_deadline`, for a cause outside of the changed pods: other pods, "
        "agents or nodes are missing",
        "Bring back what the reason waits for, or `rcfarm rollout abort RC`",
    ),
    "awaiting_promotion": ReasonKind("The canary passed, and `auto_promote` is off", "`rcfarm rollout promote RC`"),
    "rollout_paused": ReasonKind("An operator paused the rollout", "`rcfarm rollout resume RC`"),
    "analysis_no_data": ReasonKind(
        "An analysis of the rollout has nothing to judge by; the rollout is paused, and goes on when data comes",
        "Send traffic to the new pods, correct the query, or `rcfarm rollout abort RC`",
    ),
    "analysis_error": ReasonKind(
        "An analysis of the rollout can't be run; the rollout is paused, and goes on when it can",
        "Repair what is named, or `rcfarm rollout abort RC`",
    ),
    "rollout_reverting": ReasonKind("The rollout failed; the pods go back to the stable revision", blocks=False),
    "rollout_reverted": ReasonKind(
        "The rollout failed; the pods run the stable revision",
        "Apply a corrected manifest (`rcfarm rc edit RC`), or `rcfarm rc rollback RC`",
    ),
    "rollout_aborted": ReasonKind(
        "An operator aborted the rollout", "`rcfarm rollout resume RC`, or `rcfarm rc rollback RC`"
    ),
    "rollout_failed": ReasonKind(
        "The rollout failed, and there is nothing to go back to, or it is bad, too",
        "Apply another manifest: `rcfarm rc edit RC`",
    ),
    "handing_over": ReasonKind(
        "Pods pass from one RC to another; the reason says how far, and what it waits for",
        "`rcfarm rollout status RC`; `rcfarm rollout abort RC` stops it",
    ),
    "handover_waits_for_health": ReasonKind(
        "No pod passes to the other RC: no more pods are healthy than have to be", "Repair the pods that are named"
    ),
}

NODE: dict[str, ReasonKind] = {
    "node_dead": NODE_DEAD,
    "disk_full": DISK_FULL,
    "node_cordoned": ReasonKind("An operator has cordoned it: it takes no new pods", "`rcfarm node uncordon NODE`"),
    "node_evicting": ReasonKind(
        "An operator empties it: pods of dynamic RCs and of daemon sets leave, and no new ones come",
        "`rcfarm node uncordon NODE`",
    ),
    "unreadable": UNREADABLE,
}

TASK: dict[str, ReasonKind] = {
    # why it waits; stored, and therefore written as they are (`store.schema.tasks.WaitCode`)
    "Infeasible": ReasonKind(
        "It asks for more than the limit, or for a quota that does not exist; it fails at once",
        "`rcfarm quota set RESOURCE UNITS`",
    ),
    "LimitReached": ReasonKind("All units of the quota are held", "`rcfarm quota explain RESOURCE` names the holders"),
    "KeyLimitReached": ReasonKind("Its fair key holds as many units as one key may", "As for `LimitReached`"),
    "RateLimited": ReasonKind("The quota's rate of grants is used up for now", blocks=False),
    "BehindHigherPriority": ReasonKind("Executions of higher priority are granted first", blocks=False),
    "FairShare": ReasonKind("Other fair keys hold less than their share, and are granted first", blocks=False),
    "Parent": ReasonKind("It waits for another execution, as in `Dependency`", "`rcfarm explain task/ID` of that one"),
    "Dependency": ReasonKind("It waits for executions that must succeed first", "`rcfarm explain task/ID` of those"),
    "Backoff": ReasonKind("An attempt failed; the next one begins after a pause", blocks=False),
    "RemoteUnknown": ReasonKind(
        "After a crash, the plugin can't find out yet what it began outside", "Repair what the reason names"
    ),
    "PluginPaused": ReasonKind(
        "Its plugin's calls failed for one execution after the other", "Repair what the plugin calls; it is tried again"
    ),
    "EngineMissing": ReasonKind("No engine owns it", "Start `rcfarm tasks` with a selector that matches its labels"),
    "Plugin": ReasonKind("Its plugin has it, and has not reported that it runs", blocks=False),
    "CleaningUp": ReasonKind("Its plugin stops what it began", blocks=False),
    # how it ended
    "task_failed": ReasonKind(
        "It failed, and has no retries left", "`rcfarm task logs ID`; correct the cause, then `rcfarm task retry ID`"
    ),
    "task_timed_out": ReasonKind("It exceeded one of its time limits", "As for `task_failed`, or raise the limit"),
    "task_aborted": ReasonKind("It was aborted by request", "`rcfarm task retry ID` runs it again"),
    "unreadable": UNREADABLE,
}

FRAMEWORK: dict[str, ReasonKind] = {  # of training jobs, too
    # the job
    "no_operator_leads": ReasonKind("No operator holds the Lease", "Start `rcfarm jobs`, or name its Lease"),
    "not_taken_up": ReasonKind(
        "No operator has taken it up yet", "Check that the leading one watches its kind and namespace"
    ),
    "managed_elsewhere": ReasonKind("Its spec names another controller (`managedBy`)", "Ask that controller"),
    "job_unusable": ReasonKind(
        "Its spec or status can't be used; nothing new is created", "Correct it; apply it again"
    ),
    "start_awaited": ReasonKind("Its executionType is Create", "`rcfarm framework start NAME`"),
    "job_suspended": ReasonKind("It is suspended", "`rcfarm job resume NAME`"),
    "job_stopping": ReasonKind("It is asked to stop", blocks=False),
    "job_deleting": ReasonKind("It is being deleted, and waits for its pods", blocks=False),
    "creation_blocked": ReasonKind(
        "The API server refuses to create its objects", "Correct what is named: quota, name or field; it is retried"
    ),
    "no_tasks": ReasonKind("It has no tasks, so that it never completes", "Give it tasks, or delete it"),
    "gang_incomplete": ReasonKind("Members of its gang are missing", "Look at those that are named"),
    "gang_not_admitted": ReasonKind(
        "The scheduler has not admitted its PodGroup", "Look at the PodGroup and its queue"
    ),
    "attempt_failed": ReasonKind("An attempt failed; it may be tried again", "See the diagnostics and the pods' logs"),
    "job_failed": ReasonKind("It failed, and is not tried again", "Correct the cause, and create it again"),
    "job_ended": ReasonKind("It has ended", blocks=False),
    "job_expires": ReasonKind("It is deleted some time after its end", blocks=False),
    "deadline_near": ReasonKind("It fails at its deadline unless it has ended", blocks=False),
    "pods_leaving": ReasonKind("It waits until the pods of its attempt are gone", blocks=False),
    "retry_delayed": ReasonKind("It is tried again after a pause", blocks=False),
    "warned": ReasonKind("Kubernetes reports a Warning about it", "Act on the Event's message"),
    # its tasks or replicas, and their pods
    "task_attempt_failed": ReasonKind("An attempt of the task failed", "See the diagnostics and the pod's log"),
    "scaled_away": ReasonKind("It was scaled away, and leaves when its pod is gone", blocks=False),
    "pod_awaited": ReasonKind("Its pod is created next, or once what is named is there", blocks=False),
    "pod_unscheduled": ReasonKind("kube-scheduler has no node for its pod", "Act on the scheduler's message"),
    "scheduler_missing": ReasonKind("No scheduler has taken up its pod", "Check that the scheduler that is named runs"),
    "pod_deleting": ReasonKind("Its pod is being deleted", blocks=False),
    "pod_stuck": ReasonKind("Its pod should have ended, and has not", "Check its node, and its finalizers"),
    "container_waiting": ReasonKind(
        "A container can't start: its image, its configuration, or it crashes", "Act on the message of the kubelet"
    ),
    "init_running": ReasonKind("An init container of its pod has not ended", "Its log says what it waits for"),
}

GPU: dict[str, ReasonKind] = {
    "gpu_waiting": ReasonKind(
        "HiveD has no cells for the pod's group, neither free nor preemptible",
        "`rcfarm hived explain POD` has every chain",
    ),
    "gpu_preempting": ReasonKind("Its group waits until its victims are gone", blocks=False),
    "gpu_binding": ReasonKind("Its place is decided, and it is about to be bound", blocks=False),
    "gpu_being_preempted": ReasonKind("Its group is being preempted by another one", "Wait, or raise its priority"),
    "gpu_contested": ReasonKind("Its places are used by another group, too", "Delete one of the groups"),
    "gpu_quota_lost": ReasonKind("Its group lost its quota, and runs on as an opportunistic one", blocks=False),
    "gpu_refused": ReasonKind("Its request can't be read, or contradicts its group", "Correct its annotation"),
}

SCOPES: dict[Scope, dict[str, ReasonKind]] = {
    "rc": RC,
    "rollout": ROLLOUT,
    "node": NODE,
    "task": TASK,
    "framework": FRAMEWORK,
    "gpu": GPU,
}

REASONS: dict[str, ReasonKind] = {code: kind for codes in SCOPES.values() for code, kind in codes.items()}
"""Every code; one that several scopes have is the same in each."""
