"""`rcfarm hived …`."""
