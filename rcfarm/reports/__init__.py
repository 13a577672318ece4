"""Read models of Kubernetes objects for people (no I/O)."""
