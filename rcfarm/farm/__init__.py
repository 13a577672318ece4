"""The Consul-side control plane: claim RCs, plan, commit."""
