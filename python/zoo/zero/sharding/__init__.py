"""Buckets: flat memory of parameters and gradients, in their tiers, and what a parameter is meanwhile."""
