"""The dashboard: HTML pages about runs, steps, groups and rollouts, rendered on the server from the records."""
