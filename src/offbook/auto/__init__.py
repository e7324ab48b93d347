"""Training from a description alone: an LLM writes the inputs, the prompt and the rubric; a judge scores the answers."""
