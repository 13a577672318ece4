"""Read models of the state: JSON, explain, snapshot, simulate."""

SNAPSHOT_PATH = "/v1/inspect/snapshot"  # of the extender's web server
