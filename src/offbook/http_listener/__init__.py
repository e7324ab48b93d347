"""What every HTTP listener of ours has: access checks before any route, and limits on sizes, times and connections."""
