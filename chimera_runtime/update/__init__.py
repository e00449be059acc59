"""An update: with a flush or as a stream, its steps, its accumulation and its outcome."""
