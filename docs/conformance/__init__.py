"""Published schedules beside what they compile to: definition, code, placement, numbers."""
