"""What stands between DeepSpeed's arguments, results and exceptions and those of zoo."""
