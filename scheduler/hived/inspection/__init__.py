"""Read models of the state: JSON, explain, snapshot, simulate."""
