"""The page of a compilation: one HTML file in which a schedule can be looked at and played with."""
