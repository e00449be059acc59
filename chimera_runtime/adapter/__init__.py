"""A compiled schedule behind the interface of the schedules of torch.distributed.pipelining."""
