"""The database of calls, trajectories and train requests."""
