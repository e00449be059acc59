"""What a schedule costs before anything runs: durations, the earliest timeline, its critical path, the report."""
