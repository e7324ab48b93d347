"""The commands `offbook auto`, `offbook improve` and `offbook learn`."""
