"""The control loops for jobs and Frameworks on Kubernetes, the barrier, and their rate-limited work queue."""
