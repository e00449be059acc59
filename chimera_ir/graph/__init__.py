"""The typed DAG of a schedule."""
