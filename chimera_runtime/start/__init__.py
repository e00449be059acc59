"""Start of a pipeline: the probe, and the assembly of a rank's stages, lane and loaders."""
