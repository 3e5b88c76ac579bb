"""What a job will hold, send and move, before it runs."""
