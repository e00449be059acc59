"""The commands: what users type, what each prints, and how it ends."""
