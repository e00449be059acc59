"""Ranks and what passes between them: process groups, messages, objects, devices."""
