"""What a step does with reduced gradients."""
