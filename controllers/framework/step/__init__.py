"""The pure state machine: one step from status to status and actions."""
