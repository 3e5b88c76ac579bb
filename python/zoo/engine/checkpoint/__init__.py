"""What an engine saves and loads. ``checkpoints.py`` has what a script calls; everything else is imported when it is
first needed."""
