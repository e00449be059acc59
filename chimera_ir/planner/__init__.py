"""Which configuration to run: all that there are, what each is predicted to take, and which are the best."""
