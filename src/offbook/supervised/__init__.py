"""Conversations of others as training examples: files and data sets in OpenAI's fine-tuning format, checked row by row."""
