"""What is split, and over which ranks: decided before any memory moves."""
