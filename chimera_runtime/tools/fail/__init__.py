"""One message when a rank fails, and the files for a bug report."""
