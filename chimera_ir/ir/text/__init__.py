"""The text form of the IR: `printer.show`, `parser.parse`."""
