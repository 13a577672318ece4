"""The task engine: owns executions, runs their rounds, and sends their events."""
