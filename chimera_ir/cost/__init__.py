"""The cost of a schedule before anything runs: durations, the earliest timeline, its critical path, the report."""
