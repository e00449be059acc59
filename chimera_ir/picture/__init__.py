"""A timeline as a picture: as SVG in the manner of the paper's Figure 2, and as text for a terminal."""
