"""What surrounds the lanes: start-up, data, progress, the check, and the one message when something fails."""
