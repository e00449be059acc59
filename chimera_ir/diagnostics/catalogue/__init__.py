"""Every message of the compiler, one class each.

CH1 syntax, CH2 names and values, CH3 schedules, CH4 programs, CH5 IR text, CH6 repetition,
CH7 profiles and clusters, CH8 schedules of torch.distributed.pipelining.
"""
