"""Chaos: a fleet on three real Consul servers, with random faults, checked against rcfarm's guarantees.

    python -m tests.chaos --seed 1 --rounds 20

Every machine of the fleet (three Consul servers, three farms, four node agents, the operators) is a network namespace
of its own, and every packet between two of them passes a switch in user space, which cuts, delays and loses packets by
direction. In each round operators change the fleet while one to three faults are on; then the faults end, the operators
stop, and the fleet must converge. A checker reads atomic snapshots of the tree all the time, and looks at the processes
of the machine.

What is checked:

- I1  a (node, pod id) belongs to one RC;
- I2  a placement has its intent, and an intent its placement;
- I3  each act of a farm is under the ownership that it names: one actor for each fencing token, and the act lies
      between the acquisition and the end of that ownership;
- I4  fencing tokens never go back, none is above its lock's, and nothing is written while the lock is free: an
      RC's records without an owner, a node's records without an agent; but for some seconds after a rewind, until the
      farms have noticed it, a status may have the token of the other history;
- I5  the fleet converges within the time limit once the faults have ended;
- I6  the generations of each spec are unbroken, and every acknowledged change is in the audit log: no update is lost;
- I7  no daemon ends on its own or logs a traceback, and no command crashes;
- I8  a pod never has two processes on a node;
- I9  the brake is only on after desired state was really lost.

It needs root, iproute2, nsenter and /dev/net/tun. The namespaces are removed at the end, also those of an earlier run
that was killed.
"""
