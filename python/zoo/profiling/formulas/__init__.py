"""What a call of an operator does, from the shapes of its tensors: one function for each operator that computes."""
