"""What the node shares: registration, discovery, ports."""
