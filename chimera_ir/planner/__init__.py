"""Configurations for a model and a cluster: which there are, the predicted time of each, and which are the best."""
