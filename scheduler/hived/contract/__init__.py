"""What Kubernetes objects and annotations say to HiveD."""
