"""From one optimizer to another on the same parameters."""
