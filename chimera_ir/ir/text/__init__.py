"""The text form of the IR: `printer.show` writes it, `reader.parse` reads it."""
