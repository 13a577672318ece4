"""The protocol over a Consul agent."""
