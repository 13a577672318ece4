"""HiveD's process: kube-scheduler's calls, informers, binding, eviction, reload; a control loop, not a decision."""
