"""The embedded store's network face: Consul's HTTP API."""
