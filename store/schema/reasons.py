"""The closed list of codes that a `Reason` of an RC may have, with what each means and what to do.

Commands, metrics and the page Reasons take them from here; a test compares the list with the code that gives reasons.
Tasks have a list of their own (`store.schema.tasks.WaitCode`).
"""

from __future__ import annotations

from typing import NamedTuple


class ReasonKind(NamedTuple):
    """One code. `act`: what to do, "" where waiting is enough."""

    meaning: str
    act: str = ""


REASONS: dict[str, ReasonKind] = {
    # placement
    "short": ReasonKind(
        "Fewer nodes may take pods than replicas are desired",
        "Add or uncordon nodes, correct the selector, or lower the replicas; `rcfarm rc explain` has every node",
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
    "transfer_waits_for_health": ReasonKind(
        "A pod is moved only once the others pass", "Repair the pods that are named"
    ),
    "transfer_in_progress": ReasonKind(
        "A pod leaves a node that is not eligible any more; the new one has to be healthy before the old one goes",
    ),
    "transfer_waits_for_lock": ReasonKind(
        "Somebody holds the RC's mutation lock", "Wait, or end the program that is named"
    ),
    "negative_replicas": ReasonKind("The desired number is below zero, and taken as zero", "`rcfarm rc scale RC N`"),
    # what an operator asked for
    "disabled": ReasonKind("The RC is disabled: nothing is added, removed or repaired", "`rcfarm rc enable RC`"),
    "held": ReasonKind("The brake is on, so nothing is removed", "`rcfarm brake status` says why, `release` ends it"),
    # the pods
    "starting": ReasonKind("An agent has not reported the pod on its manifest yet"),
    "crashing": ReasonKind("Processes end and are started again", "The reason has exit and count; see the pod's log"),
    "restarted": ReasonKind("The pod passes, but has crashed repeatedly within minutes", "See the pod's log"),
    "failed": ReasonKind("Processes have failed and are not restarted", "Correct the program, and apply it again"),
    "unhealthy": ReasonKind("The pod does not pass its check", "The reason has the check's output"),
    "blocked": ReasonKind(
        "The agent can't bring the pod to its manifest: artifact, program, user, port or disk", "Correct what is named"
    ),
    "node_dead": ReasonKind("The agent of the pod's node does not answer", "Start the agent, or the machine"),
    # rollouts
    "rollout_in_progress": ReasonKind("A changed manifest is on its way; the reason says what it waits for"),
    "awaiting_promotion": ReasonKind("The canary passed, and `auto_promote` is off", "`rcfarm rollout promote RC`"),
    "rollout_paused": ReasonKind("An operator paused the rollout", "`rcfarm rollout resume RC`"),
    "rollout_reverting": ReasonKind("The rollout failed; the pods go back to the stable revision"),
    "rollout_reverted": ReasonKind(
        "The rollout failed; the pods run the stable revision",
        "Apply a corrected manifest, or `rcfarm rollout undo RC`",
    ),
    "rollout_aborted": ReasonKind("An operator aborted the rollout", "`rcfarm rollout resume RC`, or `undo`"),
    "rollout_failed": ReasonKind(
        "The rollout failed, and there is nothing to go back to, or it is bad, too", "Apply another manifest"
    ),
    "handing_over": ReasonKind(
        "Pods pass from one RC to another; the reason says how far, and what it waits for",
        "`rcfarm rollout status RC`; `rcfarm rollout abort RC` stops it",
    ),
    "handover_waits_for_health": ReasonKind(
        "No pod passes to the other RC: no more pods are healthy than have to be", "Repair the pods that are named"
    ),
    # what the owner can't act on
    "bad_spec": ReasonKind("The spec can't be read", "Apply the RC again"),
    "bad_placement": ReasonKind("The record of a placement can't be read", "Repair or remove the key that is named"),
    "bad_rollout": ReasonKind("The record of the rollout can't be read", "Remove the key that is named"),
    "bad_selector": ReasonKind("The node selector can't be read", "Apply the RC with a valid one"),
    "manifest_unusable": ReasonKind("The manifest is missing, damaged or malformed", "Apply the RC again"),
    "pod_id_changed": ReasonKind("The manifest has another pod id than the RC's pods", "Create another RC for it"),
    "failing": ReasonKind("Several attempts in a row failed; it is retried", "The reason has the error"),
    # what only commands see
    "unowned": ReasonKind("No farm owns the RC", "Start a farm whose selector matches its labels"),
    "unreadable": ReasonKind("A record of the RC can't be read", "`rcfarm doctor` names key, field and command"),
    "brake": ReasonKind("The brake is on", "`rcfarm brake status`"),
    "locked": ReasonKind("Somebody holds the mutation lock; edits wait", "Wait, or end the program that is named"),
    "behind": ReasonKind("The owner has not acted on the latest change yet"),
    "progressing": ReasonKind("The owner has not processed the latest change of its pods yet"),
}
