"""Schedules as the text of torch.distributed.pipelining: `csv_reader` reads it, `csv_writer` writes it."""
