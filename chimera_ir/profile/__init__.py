"""What a model's stages and a cluster's links cost: measured, counted or written by hand (section 3.4)."""
