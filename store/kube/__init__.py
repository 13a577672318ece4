"""Kubernetes' API as raw objects: a client, cached views of it (informers), leases and events."""
