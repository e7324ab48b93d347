"""The chat model calls of an app: which are redirected, to which model, and how they are recorded."""
