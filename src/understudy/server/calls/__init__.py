"""One chat completion: read, sampled, recorded, answered."""
