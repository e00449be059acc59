"""Every message of the compiler, one class each.

CH1 syntax, CH2 names and values, CH3 schedules, CH4 programs, CH5 IR text.
"""
