"""What is computed together: the rows of a step, their cost, and how they split. Imports no other room of the learner."""
