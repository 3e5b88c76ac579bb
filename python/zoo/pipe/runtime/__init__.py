"""What carries a schedule out: channels between stages, the stages of this rank, the runner of an engine."""
