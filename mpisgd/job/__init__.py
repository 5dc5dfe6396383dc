"""What makes a job from a configuration: its parts, placement, resumption, last words."""
