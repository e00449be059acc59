"""The levels of IR: immutable types in the words of the paper, each with a text form that reads back."""
