"""Schedules as the text of torch.distributed.pipelining: `csv_reader.parse` reads it."""
