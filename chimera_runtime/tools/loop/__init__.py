"""The parts of the training loop that options ask for: optimizers, autocast, saving, rehearsal."""
