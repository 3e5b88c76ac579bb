"""Masks, and the removal of what they have emptied: what the techniques that prune have in common."""
