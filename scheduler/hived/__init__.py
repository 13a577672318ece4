"""HiveD: guaranteed topology for tenants, as a Kubernetes scheduler extender. Source: microsoft/hivedscheduler.

The model, from the bottom: `topology` is the configuration resolved; `cells` are physical and virtual trees over it;
`planner` decides without changing anything and `algorithm` applies. `controllers.extender` follows every pod from
Waiting to Bound and speaks to kube-scheduler. Whatever is ordered is in the order of the configuration.
"""
