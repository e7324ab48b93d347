"""The memory plan: what sampling and training with one base take of a GPU, computed before anything is loaded. No torch."""
