"""The user's side of a rollout: capturing its calls, running many at once, and the records of them."""
