"""The store protocol, its implementations, the records kept in it, and the Kubernetes API."""
