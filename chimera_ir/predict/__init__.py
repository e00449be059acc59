"""Prediction of an iteration's time: equation 1 of the paper, and a replay of the program event by event."""
