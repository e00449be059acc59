"""Derives from the table of kinds which operation waits for which, what is sent and kept, and when operations run."""
