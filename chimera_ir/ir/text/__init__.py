"""The text form of the IR: `printer.show`, `reader.parse`."""
