"""A server's tools as the model's: schemas, results, references, and how rollouts call them."""
