"""The Kubernetes API as raw objects: a client, cached views (informers), leases and events."""
