"""A stage: forward, backward, what it keeps in between, its weights and the sums of its gradients."""
