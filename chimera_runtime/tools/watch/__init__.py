"""Progress, logs, metrics and memory of a run."""
