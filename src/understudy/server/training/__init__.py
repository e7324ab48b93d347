"""The queue of train requests, the learner's jobs, and exports."""
