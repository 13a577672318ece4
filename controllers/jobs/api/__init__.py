"""What a job is: spec, status, errors, names, and the interface that a job type implements."""
