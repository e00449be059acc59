"""Standard streams, the process that started this one, and files that are always complete. Imported before torch."""
