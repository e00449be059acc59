"""Compile pipeline schedules, written as text, to verified programs and readable PyTorch ranks."""

__version__ = "0.1.0"
