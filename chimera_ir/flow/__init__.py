"""What follows from the table of kinds: who waits for whom, what crosses a link, how much is kept, what comes again."""
