"""Messages to the user: their catalogue, and how they are drawn."""
