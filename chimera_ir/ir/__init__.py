"""The levels of IR: immutable types, the same words as the paper, and a text form of each that reads back."""
