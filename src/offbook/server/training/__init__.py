"""The queue of train requests, the jobs of the learner process, and exports of checkpoints."""
