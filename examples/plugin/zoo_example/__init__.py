"""Four components for zoo. Nothing here is imported before a configuration or a script asks for it by name."""
