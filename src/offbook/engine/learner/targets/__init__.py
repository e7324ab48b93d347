"""What a step trains: advantages, and the sampled tokens that they reach. Imports no other room of the learner."""
