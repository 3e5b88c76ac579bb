"""Values of parameters from outside: whole, edited, and what the user writes in place."""
