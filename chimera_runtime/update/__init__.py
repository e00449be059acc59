"""An update: with a flush or as a stream, its steps, accumulation, and outcome."""
