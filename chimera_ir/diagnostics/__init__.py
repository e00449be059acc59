"""What the compiler says to the user: messages as data, their catalogue, and how they are drawn."""
