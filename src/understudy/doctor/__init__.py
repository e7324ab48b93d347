"""`understudy doctor`: what this machine has, what is missing, and whether the engines can run."""
