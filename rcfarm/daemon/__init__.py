"""The frame of every daemon: ordered start/stop, signals, health listener, logs, sd_notify."""
