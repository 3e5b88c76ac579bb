"""DeepSpeed's files, their names and shapes of ranks; weights out of checkpoints."""
