"""Values that pass between stages: nested structures of tensors, their shards, digests and losses."""
