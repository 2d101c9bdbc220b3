"""PENCIL itself: losses, label steps, schedule, decisions. Pure, without I/O."""
